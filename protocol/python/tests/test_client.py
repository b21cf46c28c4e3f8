"""The clients against a scheduler that says what it is told to say."""

import asyncio
import socket
import threading
import time
import unittest
from concurrent import futures

import grpc

import kvscout
import kvscout.aio
from kvscout import Another, Unanswered, openai, tokens
from kvscout.scheduler.v1 import ranking_pb2, scheduler_pb2, scheduler_pb2_grpc

PATIENCE = 30.0  # where no time is meant to run out


class Fake(scheduler_pb2_grpc.SchedulerServicer):
    """Gives its members in turn, without those excluded."""

    def __init__(self, *members, fails=None):
        self.members, self.fails = members, fails
        self.hangs = None  # an Event that Pick waits for
        self.asked, self.reports = [], []
        self.server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Pick(self, request, context):
        self.asked.append(request.request)
        if self.hangs:
            self.hangs.wait()
        if self.fails:
            context.abort(self.fails, "told to")
        excluded = {e.address for e in request.request.exclude}
        left = [m for m in self.members if m not in excluded]
        if not left:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "all are excluded")
        ranking = ranking_pb2.Ranking(candidates=[ranking_pb2.Candidate(member=ranking_pb2.Member(address=m)) for m in left])
        return scheduler_pb2.PickResponse(decision_id="of " + left[0], ranking=ranking)

    def Report(self, request, context):
        self.reports.extend(request.reports)
        return scheduler_pb2.ReportResponse()

    def told(self):
        return [(r.decision_id, scheduler_pb2.Outcome.Name(r.outcome).removeprefix("OUTCOME_")) for r in self.reports]


class Threads:
    """Runs a test's steps through kvscout.Client."""

    def run(self, schedulers, steps, **options):
        with kvscout.Client(*schedulers, **options) as client:
            return steps(client.pick, client.do)


class Asyncio:
    """The same through kvscout.aio.Client: each step runs the loop."""

    def run(self, schedulers, steps, **options):
        loop = asyncio.new_event_loop()

        async def make():
            return kvscout.aio.Client(*schedulers, **options)

        client = loop.run_until_complete(make())

        def do(request, send, fallback=None):
            async def sending(place):
                return send(place)

            return loop.run_until_complete(client.do(request, sending, fallback))

        try:
            return steps(lambda request: loop.run_until_complete(client.pick(request)), do)
        finally:
            loop.run_until_complete(client.close())
            loop.close()


class Clients(unittest.TestCase):
    kinds = (Threads(), Asyncio())

    def fake(self, *members, **options):
        fake = Fake(*members, **options)
        self.addCleanup(lambda: fake.server.stop(None).wait())
        return fake

    def each(self):
        for kind in self.kinds:
            with self.subTest(type(kind).__name__):
                yield kind

    def nowhere(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{s.getsockname()[1]}"

    def test_reports_what_came(self):
        for kind in self.each():
            fake = self.fake("a")

            def send(place):
                self.assertEqual((place.address, place.why), ("a", None))
                place.first_token()
                place.first_token()
                place.usage(prompt=160, cached=144, output=1)
                return "answer"

            answer = kind.run([fake.address], lambda pick, do: do(tokens(range(160), "m"), send), timeout=PATIENCE)
            self.assertEqual(answer, "answer")
            self.assertEqual(fake.told(), [("of a", "FIRST_TOKEN"), ("of a", "FINISHED")])
            last = fake.reports[-1]
            self.assertEqual((last.prompt_tokens, last.cached_tokens, last.output_tokens), (160, 144, 1))
            self.assertGreater(last.ttft_ms, 0)

    def test_another_member_is_tried(self):
        for kind in self.each():
            fake = self.fake("a", "b", "c")
            tried = []

            def send(place):
                tried.append(place.address)
                if len(tried) < 3:
                    raise Another("refused")

            kind.run([fake.address], lambda pick, do: do(openai(b"{}", request_id="r"), send), timeout=PATIENCE)
            self.assertEqual(tried, ["a", "b", "c"])
            self.assertEqual([r.request_id for r in fake.asked], ["r", "r/2", "r/3"])
            self.assertEqual(fake.told(), [("of a", "FAILED"), ("of b", "FAILED"), ("of c", "FINISHED")])

    def test_tries_are_bounded(self):
        for kind in self.each():
            fake = self.fake("a", "b")
            for attempts in (1, 2, 3):  # the third has nobody left

                def send(place):
                    raise Another(place.address)

                with self.assertRaises(Another) as error:
                    kind.run([fake.address], lambda pick, do: do(openai(b"{}"), send), timeout=PATIENCE, attempts=attempts)
                self.assertEqual(str(error.exception), "ab"[min(attempts, 2) - 1])

    def test_an_answer_that_broke_off_is_not_tried_again(self):
        for kind in self.each():
            for error, outcome in ((ValueError, "FAILED"), (asyncio.CancelledError, "CANCELLED")):
                fake = self.fake("a", "b")

                def send(place):
                    raise error

                with self.assertRaises(error):
                    kind.run([fake.address], lambda pick, do: do(openai(b"{}"), send), timeout=PATIENCE)
                self.assertEqual(fake.told(), [("of a", outcome)])

    def test_the_first_end_counts(self):
        for kind in self.each():
            fake = self.fake("a")

            def send(place):
                place.cancelled()
                raise ConnectionResetError

            with self.assertRaises(ConnectionResetError):
                kind.run([fake.address], lambda pick, do: do(openai(b"{}"), send), timeout=PATIENCE)
            self.assertEqual(fake.told(), [("of a", "CANCELLED")])

    def test_another_scheduler_stands_by(self):
        for kind in self.each():
            stopping, good = self.fake(fails=grpc.StatusCode.UNAVAILABLE), self.fake("a")
            addresses = [self.nowhere(), stopping.address, good.address]
            place = kind.run(addresses, lambda pick, do: pick(openai(b"{}")), timeout=PATIENCE)
            self.assertEqual((place.address, len(stopping.asked)), ("a", 1))

    def test_what_is_wrong_is_so_everywhere(self):
        for kind in self.each():
            wrong, other = self.fake(fails=grpc.StatusCode.INVALID_ARGUMENT), self.fake("a")
            with self.assertRaises(Unanswered):
                kind.run([wrong.address, other.address], lambda pick, do: pick(openai(b"{}")), timeout=PATIENCE)
            self.assertEqual(other.asked, [])

    def test_one_that_hangs_is_left_alone(self):
        for kind in self.each():
            hangs, good = self.fake("x"), self.fake("a")
            hangs.hangs = threading.Event()
            self.addCleanup(hangs.hangs.set)

            def steps(pick, do):
                return [pick(openai(b"{}")).address for _ in range(10)]

            start = time.monotonic()
            self.assertEqual(kind.run([hangs.address, good.address], steps, timeout=3.0), ["a"] * 10)
            # It is asked again after a second, for three.
            self.assertLessEqual(len(hangs.asked), 1 + (time.monotonic() - start) / 4)

    def test_the_callers_own_choice_stands_in(self):
        for kind in self.each():
            sent = []

            def send(place):
                self.assertIsNone(place.decision)
                self.assertIsInstance(place.why, Unanswered)
                place.first_token()  # nobody is told
                sent.append(place.address)
                if len(sent) == 1:
                    raise Another("refused")

            def own(tried):
                return ["x", "y"][len(tried)]

            kind.run([self.nowhere()], lambda pick, do: do(openai(b"{}"), send, own), timeout=PATIENCE)
            self.assertEqual(sent, ["x", "y"])
            with self.assertRaises(Unanswered):
                kind.run([self.nowhere()], lambda pick, do: do(openai(b"{}"), send), timeout=PATIENCE)


if __name__ == "__main__":
    unittest.main()
