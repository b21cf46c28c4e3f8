"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

import grpc
import grpc.aio

from kvscout._placement import Another, Fallback, Placement, Reports, Scheduler, Unanswered, chosen, without
from kvscout.scheduler.v1 import request_pb2, scheduler_pb2

T = TypeVar("T")


class Client:
    """kvscout.Client for asyncio. It is made, used and closed in one running loop."""

    def __init__(
        self, *schedulers: str, timeout: float = 0.2, attempts: int = 3, credentials: grpc.ChannelCredentials | None = None
    ):
        if not schedulers:
            raise ValueError("no scheduler is named")
        self._attempts = attempts
        self._timeout = timeout
        self._schedulers: list[tuple[Scheduler, Reports]] = []
        for address in schedulers:
            channel = grpc.aio.secure_channel(address, credentials) if credentials else grpc.aio.insecure_channel(address)
            s = Scheduler(channel, timeout)
            self._schedulers.append((s, Reports(lambda batch, s=s: s.send(batch, timeout=max(timeout, 1.0)))))  # type: ignore[misc]

    async def close(self) -> None:
        """Sends the reports that wait, as far as they are taken in time, and hangs up."""
        for scheduler, reports in self._schedulers:
            await asyncio.to_thread(reports.idle.wait, 2 * max(self._timeout, 1.0))
            await scheduler.channel.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def pick(self, request: request_pb2.Request) -> Placement:
        """Asks for the member that should get the request; raises Unanswered."""
        last: Exception | None = None
        for scheduler, reports in self._schedulers:
            if scheduler.rests():
                continue
            try:
                answer = await scheduler.pick(scheduler_pb2.PickRequest(request=request), timeout=self._timeout)
                return scheduler.placed(answer, reports)
            except grpc.RpcError as error:
                last = error
                if not scheduler.refused(error):
                    break
        raise Unanswered(str(last) if last else "no scheduler has answered in time of late") from last

    async def do(
        self, request: request_pb2.Request, send: Callable[[Placement], Awaitable[T]], fallback: Fallback | None = None
    ) -> T:
        """Serves one request: asks where, awaits send with that, and reports how it ended.

        If send raises Another, another member is tried. Where no scheduler says
        where, fallback does.
        """
        tried: list[str] = []
        failed: Exception | None = None
        while len(tried) < self._attempts:
            try:
                place = await self.pick(without(request, tried))
            except Unanswered as error:
                own = chosen(fallback, tried, error)
                if own is None:
                    raise failed or error from None
                place = own
            try:
                result = await send(place)
            except Another as error:
                place.failed()
                failed = error
                tried.append(place.address)
            except Exception:
                place.failed()
                raise
            except BaseException:
                place.cancelled()
                raise
            else:
                place.finished()
                return result
        assert failed is not None
        raise failed
