"""What both clients share: requests, placements, and reports on their way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from kvscout.scheduler.v1 import request_pb2, scheduler_pb2, scheduler_pb2_grpc

# Fallback is the caller's own choice: an address that is not among those tried,
# or nothing.
Fallback = Callable[[Sequence[str]], "str | None"]

MAX_WAITING = 4096  # reports; what comes beyond is lost
REST = 1.0  # seconds for which a scheduler that did not answer in time is left alone

# What another scheduler may answer that this one did not. What is wrong with the
# request is so everywhere.
ELSEWHERE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNIMPLEMENTED,
}


class Unanswered(Exception):
    """No scheduler says where; the cause, if there is one, is the last one's error."""


class Another(Exception):
    """Raised by what sends: nothing of an answer has gone out, so another member may be tried."""


def openai(body: bytes, **fields: Any) -> request_pb2.Request:
    """A request for the JSON body of an OpenAI request, as it came."""
    return request_pb2.Request(prompt=request_pb2.Prompt(openai_body=body), **fields)


def tokens(ids: Iterable[int], model: str, **fields: Any) -> request_pb2.Request:
    """A request for a prompt of token ids."""
    prompt = request_pb2.Prompt(tokens=request_pb2.Tokens(ids=ids))
    return request_pb2.Request(prompt=prompt, model=model, **fields)


def without(request: request_pb2.Request, tried: Sequence[str]) -> request_pb2.Request:
    """The request with those excluded that were tried: another one, so with another name."""
    if not tried:
        return request
    other = request_pb2.Request()
    other.CopyFrom(request)
    other.exclude.extend(request_pb2.MemberRef(address=a) for a in tried)
    if other.request_id:
        other.request_id += f"/{len(tried) + 1}"
    return other


class Placement:
    """Where a request goes. Of finished, failed and cancelled the first counts; do() says one of them at the end."""

    def __init__(self, address: str, decision: scheduler_pb2.PickResponse | None, why: Exception | None, reports: Reports | None):
        self.address = address
        #: The scheduler's decision; None: the caller's own choice stands in, and why says why.
        self.decision = decision
        self.why = why
        self._reports = reports
        self._since = time.monotonic()
        self._ttft_ms: float | None = None
        self._usage: dict[str, int] = {}
        self._ended = False

    def first_token(self) -> None:
        """Says that the answer has begun: the prompt is computed. Once counts."""
        if self._ttft_ms is None:
            self._ttft_ms = (time.monotonic() - self._since) * 1000
            self._report(scheduler_pb2.OUTCOME_FIRST_TOKEN)

    def usage(self, prompt: int | None = None, cached: int | None = None, output: int | None = None) -> None:
        """Says what the engine counted, for the report at the end."""
        counts = {"prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": output}
        self._usage.update({name: n for name, n in counts.items() if n is not None})

    def finished(self) -> None:
        """Reports that the request was served to its end."""
        self._report(scheduler_pb2.OUTCOME_FINISHED, ttft_ms=self._ttft_ms, **self._usage)

    def failed(self) -> None:
        """Reports that the member failed."""
        self._report(scheduler_pb2.OUTCOME_FAILED)

    def cancelled(self) -> None:
        """Reports that the request was never sent, or given up by the client."""
        self._report(scheduler_pb2.OUTCOME_CANCELLED)

    def _report(self, outcome: scheduler_pb2.Outcome, **fields: Any) -> None:
        if self._reports is not None and self.decision is not None and not self._ended:
            self._ended = outcome != scheduler_pb2.OUTCOME_FIRST_TOKEN
            self._reports.add(scheduler_pb2.Report(decision_id=self.decision.decision_id, outcome=outcome, **fields))


class Reports:
    """Sends reports in their order, one batch at a time, while nobody waits."""

    def __init__(self, send: Callable[[scheduler_pb2.ReportRequest], Any]):
        self._send = send
        self._lock = threading.Lock()
        self._waiting: list[scheduler_pb2.Report] = []
        self._sending = False
        self.lost = 0
        self.idle = threading.Event()
        self.idle.set()

    def add(self, report: scheduler_pb2.Report) -> None:
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                self.lost += 1
                return
            self._waiting.append(report)
            if self._sending:
                return
            self._sending = True
            self.idle.clear()
        self._flush(None)

    def _flush(self, _call: Any) -> None:
        with self._lock:
            batch, self._waiting = self._waiting, []
            if not batch:
                self._sending = False
                self.idle.set()
                return
        self._send(scheduler_pb2.ReportRequest(reports=batch)).add_done_callback(self._flush)


class Scheduler:
    """One of those that are asked."""

    def __init__(self, channel: Any, timeout: float):
        self.channel = channel
        self.timeout = timeout
        stub = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        self.pick = stub.Pick
        self.send = stub.Report
        self._until = 0.0

    def rests(self) -> bool:
        return time.monotonic() < self._until

    def refused(self, error: grpc.RpcError) -> bool:
        """Tells whether another one may be asked. One that is too slow rests: callers would wait for it one after the other."""
        code = error.code()
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            self._until = time.monotonic() + REST
        return code in ELSEWHERE

    def placed(self, answer: scheduler_pb2.PickResponse, reports: Reports) -> Placement:
        return Placement(answer.ranking.candidates[0].member.address, answer, None, reports)


def chosen(fallback: Fallback | None, tried: Sequence[str], why: Exception) -> Placement | None:
    """The caller's own choice, if there is one."""
    address = fallback(tried) if fallback is not None else None
    if not address or address in tried:
        return None
    return Placement(address, None, why, None)
