"""Asks kvscout which LLM engine should get a request.

Client is for threads, kvscout.aio.Client for asyncio. Both ask within a time that
is never exceeded, go on to the next scheduler or to the caller's own choice when
none answers, try another member when one fails, and report what came.
"""

from kvscout._placement import Another, Fallback, Placement, Unanswered, openai, tokens
from kvscout._sync import Client
from kvscout.scheduler.v1.request_pb2 import Request
from kvscout.scheduler.v1.scheduler_pb2 import PickResponse

__all__ = ["Another", "Client", "Fallback", "PickResponse", "Placement", "Request", "Unanswered", "openai", "tokens"]
