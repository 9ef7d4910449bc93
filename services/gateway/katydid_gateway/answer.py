"""One prompt's answer: frames of the engine become text in the loop that reads them, a client's writer takes it away.

Between the two lies one delta a choice, which grows until the writer comes: a fast reader gets a token a chunk, a slow
one gets larger chunks, and beyond `buffer_bytes` the answer ends with SlowClientError and the engine is told at once.
An engine that dies before the first token is replaced by another; later, the answer ends with EngineLostError.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from katydid_runtime.block_hash import unpack_ids
from katydid_runtime.errors import EngineLostError, InternalError, KatydidError, SlowClientError
from katydid_runtime.rpc_errors import internal_error

from katydid_gateway.choice_stream import ChoiceStream, token_logprobs
from katydid_gateway.dispatch import Dispatch, Dispatcher
from katydid_gateway.engines.frames import EngineTrace, Finish, RequestStep
from katydid_gateway.request_clock import RequestClock
from katydid_gateway.requests import CachedTokens, Delta, FinishedRequest, FinishReason, TokenLogprob, Usage
from katydid_gateway.text.detokenizer import Vocabulary

__all__ = ["SLOW_CLIENT_GRACE_S", "Answer"]

# How long a client whose buffer is full may take to come back for the error that says so.
SLOW_CLIENT_GRACE_S = 5.0

# What a delta costs a client beside its text: framing of an event.
_DELTA_BYTES = 256
_LOGPROB_BYTES = 96
# Engines asked before the caller is told.
MAX_ATTEMPTS = 3


class Answer:
    """Listens to the engine, and is iterated by one writer with `batches`. `start` must be called first.

    `on_overflow` is called when the client's buffer fills: its writer is stuck and has to be stopped from outside.

    `send(answer, failed)` sends the request to the best engine that is not named in `failed`.
    """

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        prompt_ids: bytes,
        prompt_text: str,
        choices: list[ChoiceStream],
        vocabulary: Vocabulary,
        dispatcher: Dispatcher,
        clock: RequestClock,
        buffer_bytes: int,
        send: Callable[[Answer, set[str]], Awaitable[Dispatch]],
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.prompt_ids = prompt_ids
        self.prompt_text = prompt_text
        self.prompt_logprobs: list[TokenLogprob] = []
        self.clock = clock
        self.trace = EngineTrace()
        self.on_overflow: Callable[[], object] | None = None
        self._choices = choices
        self._vocabulary = vocabulary
        self._dispatcher = dispatcher
        self._buffer_bytes = buffer_bytes
        self._send = send
        self._dispatch: Dispatch | None = None
        self._running = set(range(len(choices)))
        self._failed: set[str] = set()
        self._attempts = 0
        self._cached = CachedTokens()
        self._pending: dict[int, Delta] = {}
        self._pending_bytes = 0
        self._ready = asyncio.Event()
        self._retry_for: KatydidError | None = None
        self._failure: KatydidError | None = None
        self._result: FinishedRequest | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the longest choice."""
        return max(choice.tokens for choice in self._choices)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt_ids) // 4,
            completion_tokens=sum(choice.tokens for choice in self._choices),
            cached=self._cached,
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self._choices),
        )

    @property
    def ended(self) -> bool:
        """Whether all of it was taken away by `batches`."""
        return self._result is not None

    @property
    def result(self) -> FinishedRequest:
        """What it used and where the time went. Raises InternalError before it has ended."""
        if self._result is None:
            raise InternalError("the answer has not ended")
        return self._result

    @property
    def _done(self) -> bool:
        return all(choice.done for choice in self._choices)

    async def start(self) -> None:
        """Send it. Raises UnavailableError when no engine can take it."""
        self._dispatch = await self._send(self, self._failed)

    def close(self) -> None:
        """Nobody listens any more: an unfinished request is aborted on its engine."""
        self._let_go()

    def fail(self, error: KatydidError) -> None:
        """End the answer with `error`; what is buffered is dropped, the engine stops."""
        if self._failure is None and not self._done:
            self._pending, self._pending_bytes = {}, 0
            self._break_off(error)

    async def batches(self, idle_s: float | None = None) -> AsyncIterator[list[Delta]]:
        """New output, everything there is at a time; an empty batch when nothing came for `idle_s`.

        Raises the KatydidError the answer failed with. At the end there is a `result`.
        """
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    await self._ready.wait()
            except TimeoutError:
                yield []
                continue
            self._ready.clear()
            if self._retry_for is not None:
                await self._try_again()
            if self._pending:
                batch, self._pending, self._pending_bytes = list(self._pending.values()), {}, 0
                self.clock.delivered()
                yield batch
            if self._failure is not None:
                raise self._failure
            if self._done and not self._pending:
                self._result = FinishedRequest(self.usage, self.clock.timing(self.tokens))
                return

    def on_step(self, step: RequestStep, arrived_ns: int) -> bool:
        """See EngineListener."""
        try:
            self._take(step, arrived_ns)
        except Exception as error:  # one request's text must not end the session of all
            self.fail(internal_error(error, f"request {self.request_id}"))
        return self._dispatch is None

    def on_lost(self, error: KatydidError) -> None:
        """See EngineListener."""
        self._engine_failed(error, retryable=True)

    def _take(self, step: RequestStep, arrived_ns: int) -> None:
        if self._dispatch is None:
            return
        if step.first:
            self._cached = step.cached
            self.clock.first_frame(arrived_ns, step.trace)
            self._dispatcher.first_token(self._dispatch, step.cached, step.trace)
        if step.prompt_logprobs is not None:
            ids = unpack_ids(self.prompt_ids)[1:]
            self.prompt_logprobs = token_logprobs(ids, step.prompt_logprobs, self._vocabulary)
        for row in step.rows:
            choice = self._choices[row.choice]
            if not choice.done:
                self._push(choice.feed(row))
        for finish in step.finishes:
            self._on_finish(finish)
        if self._done:
            self._let_go()
            self._ready.set()
        elif self._pending_bytes > self._buffer_bytes:
            self.fail(SlowClientError(f"the client left more than {self._buffer_bytes} bytes of output unread"))
            if self.on_overflow is not None:
                self.on_overflow()

    def _on_finish(self, finish: Finish) -> None:
        self._running.discard(finish.choice)
        if finish.trace.phases:
            self.trace = finish.trace
        if finish.error is not None:
            self._engine_failed(finish.error, retryable=finish.retryable)
            return
        if finish.reason is FinishReason.ABORT and not self._choices[finish.choice].done:
            self._engine_failed(EngineLostError("the engine aborted the request"), retryable=True)
            return
        if finish.cached.total:
            self._cached = finish.cached
        choice = self._choices[finish.choice]
        if not choice.done:
            self._push(choice.finish(finish.reason or FinishReason.STOP))

    def _engine_failed(self, error: KatydidError, *, retryable: bool) -> None:
        if self._dispatch is None:
            return
        self._failed.add(self._dispatch.engine)
        self._attempts += 1
        self._dispatcher.failed(self._dispatch)
        if retryable and not self.tokens and self._attempts < MAX_ATTEMPTS:
            self._let_go()
            self.clock.lost()
            self._retry_for = error
            self._ready.set()
        elif self._failure is None and not self._done:
            # The client gets what came before the loss: an error in mid-stream is always one of a stream that began.
            self._break_off(error)

    async def _try_again(self) -> None:
        error, self._retry_for = self._retry_for, None
        self._running = set(range(len(self._choices)))
        try:
            self._dispatch = await self._send(self, self._failed)
        except KatydidError as no_other:
            no_other.__cause__ = error
            # Nothing was delivered, so a lost engine is a reason to try again; an engine's own refusal says more.
            self._failure = no_other if error is None or isinstance(error, EngineLostError) else error

    def _push(self, delta: Delta) -> None:
        waiting = self._pending.get(delta.index)
        if waiting is None:
            self._pending[delta.index] = delta
            self._pending_bytes += _DELTA_BYTES
        else:
            waiting.text += delta.text
            waiting.reasoning += delta.reasoning
            waiting.tool_calls += delta.tool_calls
            waiting.ids += delta.ids
            waiting.logprobs += delta.logprobs
            waiting.finish = delta.finish
        entries = sum(1 + len(entry.top) for entry in delta.logprobs)
        text = len(delta.text) + len(delta.reasoning) + sum(len(call.arguments) for call in delta.tool_calls)
        self._pending_bytes += text + len(delta.ids) + entries * _LOGPROB_BYTES
        self._ready.set()

    def _break_off(self, error: KatydidError) -> None:
        self._failure = error
        self._let_go()
        self._ready.set()

    def _let_go(self) -> None:
        dispatch, self._dispatch = self._dispatch, None
        if dispatch is not None:
            self._dispatcher.ended(dispatch)
            if self._running:
                dispatch.abort()
