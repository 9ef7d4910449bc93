"""The same client for code without an event loop: `Katydid` runs an AsyncKatydid on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

from katydid_runtime.errors import ConflictError

from katydid_client.client import AsyncKatydid
from katydid_client.stream import CompletionStream
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

__all__ = ["BlockingStream", "Katydid"]

T = TypeVar("T")


class Katydid:
    """Blocking twin of AsyncKatydid: same arguments, same results, same errors. Close it, or use it in `with`."""

    def __init__(self, address: str = "127.0.0.1:8001", **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="katydid-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(_make(address, options))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the thread."""
        if self._loop.is_closed():
            return
        try:
            self._run(self._client.close())
        finally:
            self._end()

    def chat(self, messages: Iterable[MessageLike], **arguments: Unpack[ChatArguments]) -> Completion:
        return self._run(self._client.chat(messages, **arguments))

    def chat_stream(self, messages: Iterable[MessageLike], **arguments: Unpack[ChatArguments]) -> BlockingStream:
        return BlockingStream(self._client.chat_stream(messages, **arguments), self._run)

    def generate(self, prompt: str | Sequence[int], **arguments: Unpack[RequestArguments]) -> Completion:
        return self._run(self._client.generate(prompt, **arguments))

    def generate_stream(self, prompt: str | Sequence[int], **arguments: Unpack[RequestArguments]) -> BlockingStream:
        return BlockingStream(self._client.generate_stream(prompt, **arguments), self._run)

    def tokenize(
        self,
        text: str = "",
        *,
        messages: Iterable[MessageLike] = (),
        tools: Iterable[ToolLike] = (),
        model: str = "",
    ) -> Tokens:
        return self._run(self._client.tokenize(text, messages=messages, tools=tools, model=model))

    def detokenize(self, ids: Sequence[int], *, model: str = "") -> str:
        return self._run(self._client.detokenize(ids, model=model))

    def models(self) -> tuple[Model, ...]:
        return self._run(self._client.models())

    def explain_route(
        self,
        prompt: str | Sequence[int] = "",
        *,
        messages: Iterable[MessageLike] = (),
        model: str = "",
        without_engine: str = "",
        with_another: bool = False,
        prompt_cache_key: str = "",
    ) -> RouteExplanation:
        return self._run(
            self._client.explain_route(
                prompt,
                messages=messages,
                model=model,
                without_engine=without_engine,
                with_another=with_another,
                prompt_cache_key=prompt_cache_key,
            )
        )

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise ConflictError("this client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C in the caller's thread must also end the call on the loop.
            future.cancel()
            raise


class BlockingStream:
    """Context manager and iterator over a CompletionStream."""

    def __init__(self, stream: CompletionStream, run: Any) -> None:
        self._stream = stream
        self._run = run

    def __enter__(self) -> Self:
        self._run(self._stream.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stream.__aexit__())

    def __iter__(self) -> Iterator[Event]:
        while (event := self._run(_next(self._stream))) is not None:
            yield event

    def get_final(self) -> Completion:
        """Read what is left and return the whole."""
        completion: Completion = self._run(self._stream.get_final())
        return completion


async def _make(address: str, options: dict[str, Any]) -> AsyncKatydid:
    """gRPC binds a channel to the loop that runs when it is made."""
    return AsyncKatydid(address, **options)


async def _next(stream: CompletionStream) -> Event | None:
    return await anext(stream, None)
