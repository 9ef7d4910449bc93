"""katydid.gateway.v1.InferenceService: translation between its messages and the gateway's own requests."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid.gateway.v1.gateway_pb2_grpc import InferenceServiceServicer
from katydid_runtime.errors import PayloadTooLargeError
from katydid_runtime.trace_context import TraceContext

from katydid_gateway import wire
from katydid_gateway.access.door import Door
from katydid_gateway.access.scopes import Scope
from katydid_gateway.answer import SLOW_CLIENT_GRACE_S, Answer
from katydid_gateway.generation import Generator
from katydid_gateway.requests import Caller, Delta, GenerationRequest, Prompt, TextPrompt

__all__ = ["InferenceServicer"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Event = TypeVar("Event", pb.GenerateResponse, pb.ChatResponse)


class InferenceServicer(InferenceServiceServicer):
    """Errors are mapped by the server's interceptor; a caller that leaves cancels the handler, and so the request.

    The last event of a Generate or Chat has usage and timing and nothing else.
    """

    def __init__(self, generator: Generator, door: Door, max_message_bytes: int) -> None:
        self._generator = generator
        self._door = door
        self._max_message_bytes = max_message_bytes

    def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        return self._answer(request, context, "generate", lambda: wire.prompt_from(request.prompt), wire.generate_event)

    def Chat(self, request: pb.ChatRequest, context: Context) -> AsyncIterator[pb.ChatResponse]:
        return self._answer(request, context, "grpc_chat", lambda: wire.conversation_from(request), wire.chat_event)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        await self._caller(request, context, Scope.TOKENIZE)
        prompt: Prompt = wire.conversation_from(request) if request.messages else TextPrompt(request.text)
        encoded = await self._generator.encode(request.model, prompt)
        return pb.TokenizeResponse(token_ids=encoded.ids, tokens=encoded.tokens, prompt=encoded.text)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        await self._caller(request, context, Scope.TOKENIZE)
        return pb.DetokenizeResponse(text=self._generator.decode(request.model, request.token_ids))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        await self._caller(request, context, None)
        limits = self._generator.fleet.limits
        model = pb.Model(
            id=limits.model, max_model_tokens=limits.max_model_tokens, engines=self._generator.fleet.healthy
        )
        return pb.ListModelsResponse(models=[model])

    async def ExplainRoute(self, request: pb.ExplainRouteRequest, context: Context) -> pb.ExplainRouteResponse:
        caller, _ = await self._caller(request, context, Scope.EXPLAIN)
        prompt: Prompt = wire.conversation_from(request) if request.messages else wire.prompt_from(request.prompt)
        routed, decision = await self._generator.explain(
            request.model,
            prompt,
            request.options.prompt_cache_key,
            caller.tenant,
            without=request.without_engine,
            another=request.with_another,
        )
        return wire.explanation(routed, decision)

    async def _answer(
        self,
        request: pb.GenerateRequest | pb.ChatRequest,
        context: Context,
        api: str,
        prompt: Callable[[], Prompt],
        event: Callable[[str, Delta], Event],
    ) -> AsyncIterator[Event]:
        caller, request_id = await self._caller(request, context, Scope.INFERENCE)
        asked = GenerationRequest(
            prompt(),
            request.model,
            wire.sampling_from(request.sampling),
            wire.options_from(request.options, request_id),
        )
        with self._door.place(caller.tenant):
            async with self._generator.answer(asked, caller, api) as answer:
                _watch_writer(answer)
                async for batch in answer.batches():
                    for delta in batch:
                        if not delta.empty:
                            yield event(answer.request_id, delta)
                yield _account(event(answer.request_id, Delta(0)), answer)

    async def _caller(self, request: Message, context: Context, needed: Scope | None) -> tuple[Caller, str]:
        """Who calls, under which request id.

        Raises UnauthenticatedError, PermissionDeniedError, PayloadTooLargeError.
        """
        received_ns, began_ns = time.time_ns(), time.monotonic_ns()
        metadata = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
        known = dict(metadata)
        tenant = await self._door.tenant(known.get("authorization", ""), needed)
        size = request.ByteSize()
        if size > self._max_message_bytes:
            raise PayloadTooLargeError(
                f"the message has {size} bytes", field="message", allowed=f"at most {self._max_message_bytes} bytes"
            )
        trace, session = TraceContext.from_headers(metadata), known.get("x-session-id", "")
        caller = Caller(received_ns, tenant, trace, context.time_remaining(), session, began_ns)
        return caller, known.get("x-request-id") or f"req-{uuid.uuid4().hex}"


def _account(last: Event, answer: Answer) -> Event:
    """The last event, with what the request used and where its time went."""
    usage, timing = wire.usage_and_timing(answer.result)
    last.usage.CopyFrom(usage)
    last.timing.CopyFrom(timing)
    if isinstance(last, pb.GenerateResponse):
        last.prompt_logprobs.extend(map(wire.logprob_message, answer.prompt_logprobs))
    return last


def _watch_writer(answer: Answer) -> None:
    """A writer stuck in flow control is stopped from outside, unless its client comes back for the reason in time."""
    task = asyncio.current_task()
    assert task is not None
    answer.on_failed = lambda: asyncio.get_running_loop().call_later(SLOW_CLIENT_GRACE_S, task.cancel)
