"""Pick, then Report, with what grpcio-tools generates: python example.py HOST:PORT MODEL"""

import sys

import grpc

from kvscout.scheduler.v1 import request_pb2, scheduler_pb2, scheduler_pb2_grpc

address, model = sys.argv[1:]
with grpc.insecure_channel(address) as channel:
    scheduler = scheduler_pb2_grpc.SchedulerStub(channel)
    prompt = request_pb2.Prompt(tokens=request_pb2.Tokens(ids=range(1, 161)))
    decision = scheduler.Pick(
        scheduler_pb2.PickRequest(request=request_pb2.Request(model=model, prompt=prompt)),
        timeout=5,
    )
    first = decision.ranking.candidates[0]
    print("picked", first.member.address, first.cached_tokens.gpu)

    # Here the request goes to first.member.address.

    report = scheduler_pb2.Report(
        decision_id=decision.decision_id,
        outcome=scheduler_pb2.OUTCOME_FINISHED,
        prompt_tokens=160,
        cached_tokens=first.cached_tokens.gpu,
    )
    answer = scheduler.Report(scheduler_pb2.ReportRequest(reports=[report]), timeout=5)
    print("reported", scheduler_pb2.ReportStatus.Name(answer.results[0].status))
