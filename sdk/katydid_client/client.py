"""The client: one class for one gateway, every call a coroutine or a stream.

async with AsyncKatydid("gateway:8001", api_key=key) as client:
    completion = await client.chat([{"role": "user", "content": "Hello"}], max_tokens=100)
    print(completion.text, completion.usage.cached_tokens, completion.timing.ttft_s)
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self, Unpack

from katydid.gateway.v1 import gateway_pb2 as pb
from katydid_runtime.errors import DeadlineExceededError, InvalidRequestError, KatydidError

from katydid_client import wire
from katydid_client.retry import delay_s
from katydid_client.stream import CompletionStream
from katydid_client.transport import GrpcTransport, Metadata, Tls, Transport
from katydid_client.types import (
    ChatArguments,
    Completion,
    Event,
    MessageLike,
    Model,
    RequestArguments,
    RouteExplanation,
    Tokens,
    ToolLike,
)

__all__ = ["AsyncKatydid"]


# gRPC takes what is much longer for a deadline that has passed.
_LONGEST_S = 366 * 86_400.0


@dataclass(frozen=True, slots=True)
class _Policy:
    """What every call of a client obeys."""

    metadata: Metadata
    timeout_s: float
    max_retries: int

    def __post_init__(self) -> None:
        if not isinstance(self.timeout_s, int | float) or math.isnan(self.timeout_s):
            raise InvalidRequestError(
                f"timeout is {self.timeout_s}", field="timeout", value=self.timeout_s, allowed="a number of seconds"
            )


class AsyncKatydid:
    """Client of the gateway at `address` ("host:port" or "unix:/path"); several tasks may share one.

    `timeout` bounds a whole call in seconds, retries and their waits included. A request is sent again up to
    `max_retries` times when its error says that a retry can help and nothing of the answer has arrived. `tls` is None
    for plain text, `Tls()` for the system's roots. `transport` replaces gRPC in tests, see `MockTransport`.

    Every method raises the errors of katydid_runtime.errors, re-exported by katydid_client.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:8001",
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        max_retries: int = 2,
        tls: Tls | None = None,
        transport: Transport | None = None,
    ) -> None:
        metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._policy = _Policy(metadata, timeout, max_retries)
        self._transport = transport if transport is not None else GrpcTransport(address, tls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._transport.close()

    def with_options(self, *, timeout: float | None = None, max_retries: int | None = None) -> AsyncKatydid:
        """The same client and connection with another timeout or number of retries."""
        copy = object.__new__(AsyncKatydid)
        copy._transport = self._transport
        copy._policy = _Policy(
            self._policy.metadata,
            self._policy.timeout_s if timeout is None else timeout,
            self._policy.max_retries if max_retries is None else max_retries,
        )
        return copy

    async def chat(self, messages: Iterable[MessageLike], **arguments: Unpack[ChatArguments]) -> Completion:
        """The answer to a conversation."""
        async with self.chat_stream(messages, **arguments) as stream:
            return await stream.get_final()

    def chat_stream(self, messages: Iterable[MessageLike], **arguments: Unpack[ChatArguments]) -> CompletionStream:
        """The same, event by event."""
        return self._completion_stream("Chat", wire.chat_request(messages, arguments), arguments)

    async def generate(self, prompt: str | Sequence[int], **arguments: Unpack[RequestArguments]) -> Completion:
        """The continuation of a text, or of token ids, without a chat template."""
        async with self.generate_stream(prompt, **arguments) as stream:
            return await stream.get_final()

    def generate_stream(self, prompt: str | Sequence[int], **arguments: Unpack[RequestArguments]) -> CompletionStream:
        """The same, event by event."""
        return self._completion_stream("Generate", wire.generate_request(prompt, arguments), arguments)

    async def tokenize(
        self,
        text: str = "",
        *,
        messages: Iterable[MessageLike] = (),
        tools: Iterable[ToolLike] = (),
        model: str = "",
    ) -> Tokens:
        """The token ids an engine would get for `text`, or for a conversation."""
        request = pb.TokenizeRequest(
            model=model, text=text, messages=wire.chat_messages(messages), tools=wire.chat_tools(tools)
        )
        return wire.tokens(await self._unary("Tokenize", request))

    async def detokenize(self, ids: Sequence[int], *, model: str = "") -> str:
        """The text of token ids."""
        response = await self._unary("Detokenize", pb.DetokenizeRequest(model=model, token_ids=wire.pack(ids)))
        return str(response.text)

    async def models(self) -> tuple[Model, ...]:
        """The models that can be asked for."""
        return wire.models(await self._unary("ListModels", pb.ListModelsRequest()))

    async def explain_route(
        self,
        prompt: str | Sequence[int] = "",
        *,
        messages: Iterable[MessageLike] = (),
        model: str = "",
        without_engine: str = "",
        with_another: bool = False,
        prompt_cache_key: str = "",
    ) -> RouteExplanation:
        """Where a prompt or conversation would be sent now, and why, without sending it; without an engine, or with one
        more that is idle and empty, to see what that would change."""
        request = pb.ExplainRouteRequest(
            model=model,
            prompt=wire.prompt(prompt),
            messages=wire.chat_messages(messages),
            options=wire.request_options({"prompt_cache_key": prompt_cache_key}),
            without_engine=without_engine,
            with_another=with_another,
        )
        return wire.route(await self._unary("ExplainRoute", request))

    def _completion_stream(
        self, method: str, request: pb.ChatRequest | pb.GenerateRequest, arguments: RequestArguments
    ) -> CompletionStream:
        # One id for all tries: the gateway's log shows that they belong together.
        request.options.request_id = request.options.request_id or uuid.uuid4().hex
        metadata = [*self._policy.metadata, ("x-request-id", request.options.request_id)]
        if traceparent := arguments.get("traceparent"):
            metadata.append(("traceparent", traceparent))
        return CompletionStream(lambda: self._events(method, request, metadata))

    async def _events(self, method: str, request: Any, metadata: Metadata) -> AsyncGenerator[Event, None]:
        tries = _Tries(self._policy)
        while True:
            delivered = False
            call = self._transport.stream(method, request, metadata=metadata, timeout_s=tries.left_s)
            try:
                async with aclosing(call):
                    async for response in call:
                        delivered = True
                        yield wire.event(response)
                return
            except KatydidError as error:
                if delivered:
                    raise
                await tries.wait_after(error)

    async def _unary(self, method: str, request: Any) -> Any:
        tries = _Tries(self._policy)
        while True:
            try:
                return await self._transport.unary(
                    method, request, metadata=self._policy.metadata, timeout_s=tries.left_s
                )
            except KatydidError as error:
                await tries.wait_after(error)


class _Tries:
    """The tries of one call: how many failed, and how much of its time is left."""

    def __init__(self, policy: _Policy) -> None:
        self._policy = policy
        self._deadline = time.monotonic() + policy.timeout_s
        self._failures = 0

    @property
    def left_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceededError(f"no answer within {self._policy.timeout_s:g} s")
        return min(left, _LONGEST_S)

    async def wait_after(self, error: KatydidError) -> None:
        """Return when it is time to try again; raise `error` when it is not to be tried again."""
        self._failures += 1
        wait = delay_s(error, self._failures, self._policy.max_retries, self.left_s)
        if wait is None:
            raise error
        await asyncio.sleep(wait)
