"""Typed client of a Katydid gateway over gRPC, async first.

async with AsyncKatydid("127.0.0.1:8001") as client:
    async with client.chat_stream([{"role": "user", "content": "Hello"}]) as stream:
        async for event in stream:
            print(event.text, end="", flush=True)
        print((await stream.get_final()).usage)
"""

from katydid_runtime.errors import (
    DeadlineExceededError,
    EngineLostError,
    InternalError,
    InvalidRequestError,
    KatydidError,
    NotFoundError,
    OverloadedError,
    PayloadTooLargeError,
    PermissionDeniedError,
    PromptTooLongError,
    RequestAbortedError,
    UnauthenticatedError,
    UnavailableError,
    UnknownModelError,
    UnsupportedError,
)

from katydid_client.blocking import BlockingStream, Katydid
from katydid_client.client import AsyncKatydid
from katydid_client.stream import CompletionStream
from katydid_client.transport import GrpcTransport, MockTransport, Tls, Transport
from katydid_client.types import (
    CachedTokens,
    ChatArguments,
    Choice,
    Completion,
    Event,
    FinishReason,
    Message,
    Model,
    RequestArguments,
    RouteCandidate,
    RouteExplanation,
    Timing,
    TokenLogprob,
    Tokens,
    Tool,
    ToolCall,
    Usage,
)

__all__ = [
    "AsyncKatydid",
    "BlockingStream",
    "CachedTokens",
    "ChatArguments",
    "Choice",
    "Completion",
    "CompletionStream",
    "DeadlineExceededError",
    "EngineLostError",
    "Event",
    "FinishReason",
    "GrpcTransport",
    "InternalError",
    "InvalidRequestError",
    "Katydid",
    "KatydidError",
    "Message",
    "MockTransport",
    "Model",
    "NotFoundError",
    "OverloadedError",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "PromptTooLongError",
    "RequestAbortedError",
    "RequestArguments",
    "RouteCandidate",
    "RouteExplanation",
    "Timing",
    "Tls",
    "TokenLogprob",
    "Tokens",
    "Tool",
    "ToolCall",
    "Transport",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownModelError",
    "UnsupportedError",
    "Usage",
]
