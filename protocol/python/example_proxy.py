"""A proxy for vLLM: python example_proxy.py PORT SCHEDULER[,SCHEDULER] ENGINE[,ENGINE...]

The engines are for when no scheduler answers: they are served in turn then.
"""

import itertools
import json
import sys

from aiohttp import ClientConnectionError, ClientSession, web

from kvscout import Another, Placement, openai
from kvscout.aio import Client

port, schedulers, engines = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(",")
turn = itertools.cycle(engines)


def own_choice(tried):
    return next((e for e in itertools.islice(turn, len(engines)) if e not in tried), None)


async def serve(request: web.Request) -> web.StreamResponse:
    body = await request.read()

    async def send(place: Placement) -> web.StreamResponse:
        try:
            answer = await request.app["http"].post(f"http://{place.address}{request.path}", data=body, headers={"Content-Type": "application/json"})
        except ClientConnectionError as error:  # nothing has come
            raise Another(place.address) from error
        async with answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"], "X-Engine": place.address})
            await response.prepare(request)
            end = b""
            async for chunk in answer.content.iter_any():
                place.first_token()
                try:
                    await response.write(chunk)
                except ConnectionResetError:  # the client's fault
                    place.cancelled()
                    raise
                end = (end + chunk)[-4096:]
            await response.write_eof()
            if (at := end.rfind(b'"usage":')) >= 0:  # of JSON, or of a stream's last event
                usage, _ = json.JSONDecoder().raw_decode(end[at + 8 :].decode().lstrip())
                place.usage(usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens"), usage.get("completion_tokens"))
            return response

    return await request.app["client"].do(openai(body), send, own_choice)


async def clients(app: web.Application):
    async with Client(*schedulers) as app["client"], ClientSession() as app["http"]:
        yield


app = web.Application(client_max_size=16 << 20)
app.cleanup_ctx.append(clients)
app.add_routes([web.post("/v1/completions", serve), web.post("/v1/chat/completions", serve)])
web.run_app(app, host="127.0.0.1", port=port, handler_cancellation=True)
