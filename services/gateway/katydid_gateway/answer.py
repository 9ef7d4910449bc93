"""One prompt's answer: frames of the engine become text in the loop that reads them, a client's writer takes it away.

Between the two lies one delta a choice, which grows until the writer comes: a fast reader gets a token a chunk, a slow
one gets larger chunks, and beyond `buffer_bytes` the answer ends with SlowClientError and the engine is told at once.
An engine that dies is replaced by another. Before the first token that one gets the request as it was; later, each
unfinished choice goes on by itself behind the tokens that came, at the same seed and position: it says what the lost
engine would have said. Prompts that one engine computes for another to continue are handed off in the same way.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable

from katydid_runtime.block_hash import pack_ids, unpack_ids
from katydid_runtime.errors import EngineLostError, InternalError, KatydidError, SlowClientError
from katydid_runtime.rpc_errors import internal_error

from katydid_gateway.choice_stream import ChoiceStream, token_logprobs
from katydid_gateway.dispatch import Dispatch, Dispatcher
from katydid_gateway.engines.frames import EngineTrace, Finish, RequestStep
from katydid_gateway.flight import Flight, Part
from katydid_gateway.request_clock import RequestClock
from katydid_gateway.requests import CachedTokens, Delta, FinishedRequest, FinishReason, TokenLogprob, Usage
from katydid_gateway.text.detokenizer import Vocabulary

__all__ = ["SLOW_CLIENT_GRACE_S", "Answer"]

# How long a client whose buffer is full may take to come back for the error that says so.
SLOW_CLIENT_GRACE_S = 5.0

# What a delta costs a client beside its text: framing of an event.
_DELTA_BYTES = 256
_LOGPROB_BYTES = 96
# Engines asked before the caller is told: a request that kills its engines must not go through the fleet.
MAX_ATTEMPTS = 3


class Answer:
    """Listens to its flights, and is iterated by one writer with `batches`, which sends it too.

    `on_failed` is called when `fail` ends it: a writer whose client does not read has to be stopped from outside.

    `send(flight, failed)` sends a flight to the best engine that is not named in `failed`. With `resume` false an
    answer that has begun ends with its engine. `grammar_field` is what the caller calls that which the engine calls its
    grammar.
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
        send: Callable[[Flight, set[str]], Awaitable[Dispatch]],
        resume: bool = True,
        grammar_field: str = "",
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.prompt_ids = prompt_ids
        self.prompt_text = prompt_text
        self.prompt_logprobs: list[TokenLogprob] = []
        self.clock = clock
        self.trace = EngineTrace()
        self.on_failed: Callable[[], object] | None = None
        self.resumes = 0
        self._choices = choices
        self._unfinished = len(choices)
        self._vocabulary = vocabulary
        self._dispatcher = dispatcher
        self._buffer_bytes = buffer_bytes
        self._send = send
        self._resume = resume
        self._grammar_field = grammar_field
        self._flights: set[Flight] = set()
        self._generated = [array("I") for _ in choices]
        self._begun = False
        self._failed: set[str] = set()
        self._cached = CachedTokens()
        self._pending: dict[int, Delta] = {}
        self._pending_bytes = 0
        self._ready = True
        self._waiter: asyncio.Future[bool] | None = None
        self._waits_since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._to_send = [Flight(self, range(len(choices)))]
        self._sending: asyncio.Timeout | None = None
        self._lost_by: KatydidError | None = None
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
        return not self._unfinished

    def close(self) -> None:
        """Nobody listens any more: an unfinished request is aborted on its engine."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._let_go()

    def fail(self, error: KatydidError) -> None:
        """End the answer with `error`; what is buffered is dropped, the engine stops.

        One that is complete stays so, but its writer has no more time either.
        """
        if self._failure is None and not self._done:
            self._pending, self._pending_bytes = {}, 0
            self._break_off(error)
            if self._sending is not None:
                self._sending.reschedule(asyncio.get_running_loop().time())
        if self.on_failed is not None:
            self.on_failed()

    async def batches(self, idle_s: float | None = None) -> AsyncIterator[list[Delta]]:
        """New output, everything there is at a time; an empty batch when nothing came for `idle_s`.

        Raises the KatydidError the answer failed with. At the end there is a `result`.
        """
        while True:
            if not self._ready and not await self._something(idle_s):
                yield []
                continue
            self._ready = False
            if self._to_send and self._failure is None:
                await self._send_all()
            if self._pending:
                batch, self._pending, self._pending_bytes = list(self._pending.values()), {}, 0
                self.clock.delivered()
                if self._failure is None and self._done:
                    # Before the last output is written, so that its writer can send it with the end.
                    self._result = FinishedRequest(self.usage, self.clock.timing(self.tokens))
                yield batch
            if self._failure is not None:
                raise self._failure
            if self._done and not self._pending:
                self._result = self._result or FinishedRequest(self.usage, self.clock.timing(self.tokens))
                return

    async def _something(self, idle_s: float | None) -> bool:
        """Wait until there is something to do; False when there was nothing for `idle_s`."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._waits_since = loop.time()
        if idle_s is not None and self._idle_timer is None:
            self._idle_timer = loop.call_later(idle_s, self._look_idle, idle_s)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _look_idle(self, idle_s: float) -> None:
        """One timer for all waits of an answer: a chunk would pay for one of its own more than for its text."""
        loop = asyncio.get_running_loop()
        self._idle_timer = None
        left_s = idle_s
        if self._waiter is not None and not self._waiter.done():
            left_s = self._waits_since + idle_s - loop.time()
            if left_s <= 0:
                self._waiter.set_result(False)
                return
        self._idle_timer = loop.call_later(left_s, self._look_idle, idle_s)

    def _wake(self) -> None:
        self._ready = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def on_step(self, flight: Flight, step: RequestStep, arrived_ns: int) -> None:
        """See FlightListener."""
        try:
            self._take(flight, step, arrived_ns)
        except Exception as error:  # one request's text must not end the session of all
            self.fail(internal_error(error, f"request {self.request_id}"))

    def on_lost(self, flight: Flight, error: KatydidError) -> None:
        """See FlightListener."""
        self._engine_failed(flight, error, retryable=True)

    def _take(self, flight: Flight, step: RequestStep, arrived_ns: int) -> None:
        if step.first and flight.dispatch is not None:
            if not self._begun:
                self._begun, self._cached = True, step.cached
                self.clock.first_frame(arrived_ns, step.trace)
            self._dispatcher.first_token(flight.dispatch, step.cached, step.trace)
        for part in step.prompt_logprobs:
            # The first token of a prompt has none.
            ids = unpack_ids(self.prompt_ids)[1 + len(self.prompt_logprobs) :][: len(part.chosen)]
            self.prompt_logprobs += token_logprobs(ids, part, self._vocabulary)
        for row in step.rows:
            index = flight.choices[row.choice]
            choice = self._choices[index]
            if not choice.done:
                self._generated[index].extend(row.ids)
                self._push(choice.feed(row))
                self._unfinished -= choice.done
        for finish in step.finishes:
            self._on_finish(flight, finish)
        if self._done:
            self._let_go()
            self._wake()
        elif self._pending_bytes > self._buffer_bytes:
            self.fail(SlowClientError(f"the client left more than {self._buffer_bytes} bytes of output unread"))

    def _on_finish(self, flight: Flight, finish: Finish) -> None:
        index = flight.choices[finish.choice]
        choice = self._choices[index]
        flight.running.discard(index)
        if finish.trace.phases:
            self.trace = finish.trace
        if finish.error is not None:
            # An engine that lost its worker can still say so: what it had begun goes on elsewhere all the same.
            lost = isinstance(finish.error, EngineLostError)
            self._engine_failed(flight, finish.error, retryable=finish.retryable or lost)
            return
        if finish.reason is FinishReason.ABORT and not choice.done:
            self._engine_failed(flight, EngineLostError("the engine aborted the request"), retryable=True)
            return
        if finish.cached.total and flight.part is None:
            self._cached = finish.cached
        if flight.hands_off and finish.reason is FinishReason.LENGTH and not choice.done:
            self._hand_off(flight, index)
            return
        if not choice.done:
            self._push(choice.finish(finish.reason or FinishReason.STOP))
            self._unfinished -= 1
        if not flight.running:
            self._land(flight)

    def _hand_off(self, flight: Flight, index: int) -> None:
        """A choice has its first token from an engine that computes prompts: another one goes on."""
        if flight.dispatch is None:
            return
        engine = flight.dispatch.engine
        part = Part(index, pack_ids(self._generated[index]))
        self._to_send.append(Flight(self, (index,), part, flight.attempt, giver=engine))
        self._dispatcher.handed_off(engine)
        if not flight.running:
            self._land(flight)
        self._wake()

    def _engine_failed(self, flight: Flight, error: KatydidError, *, retryable: bool) -> None:
        if flight.dispatch is None:
            return
        if self._grammar_field and (error.field or "").startswith("sampling.grammar"):
            error.field = self._grammar_field
        engine = flight.dispatch.engine
        self._failed.add(engine)
        self._dispatcher.failed(flight.dispatch, error, retryable=retryable)
        begun = self.tokens > 0
        if begun and isinstance(self._lost_by, EngineLostError):
            # Who would not go on with a lost engine's answer did not end it.
            error = self._lost_by
        self._land(flight)
        again = retryable and flight.attempt < MAX_ATTEMPTS
        if begun:
            again = again and self._resume
        else:
            again = again and self._dispatcher.may_retry(error)
        if not again:
            if self._failure is None and not self._done:
                # The client gets what came before: an error in mid-stream is always one of a stream that began.
                self._break_off(error)
            return
        if begun:
            # A choice that it handed off before it was lost goes on already.
            others = {other.part.choice for other in (*self._flights, *self._to_send) if other.part is not None}
            lost = [index for index in flight.choices if not self._choices[index].done and index not in others]
            parts = [Part(index, pack_ids(self._generated[index])) for index in lost]
            self._to_send += [Flight(self, (part.choice,), part, flight.attempt + 1) for part in parts]
            self.resumes += bool(parts)
            self._dispatcher.resumed(engine, len(parts))
        else:
            self.clock.lost()
            self.prompt_logprobs = []
            self._to_send.append(Flight(self, flight.choices, flight.part, flight.attempt + 1))
        self._lost_by = error
        self._wake()

    async def _send_all(self) -> None:
        """Send what is to be sent, which may have to wait for its turn: a failure ends the wait."""
        flights, self._to_send = self._to_send, []
        try:
            async with asyncio.timeout(None) as self._sending:
                for flight in flights:
                    await self._launch(flight)
        except TimeoutError:
            if self._failure is None:
                raise
        except KatydidError as no_other:
            error = self._lost_by
            no_other.__cause__ = error
            # Where nothing was delivered, a lost engine is a reason to try again; an engine's own refusal says more.
            again = error is None or (isinstance(error, EngineLostError) and not self.tokens)
            self._break_off(no_other if again or error is None else error)
        finally:
            self._sending = None

    async def _launch(self, flight: Flight) -> None:
        flight.dispatch = await self._send(flight, self._failed)
        self._flights.add(flight)
        if self._failure is not None or self._done:
            self._land(flight)

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
            waiting.finish, waiting.stop_string = delta.finish, delta.stop_string
        self._pending_bytes += len(delta.text) + len(delta.reasoning) + len(delta.ids)
        if delta.tool_calls:
            self._pending_bytes += sum(len(call.arguments) for call in delta.tool_calls)
        if delta.logprobs:
            self._pending_bytes += sum(1 + len(entry.top) for entry in delta.logprobs) * _LOGPROB_BYTES
        self._wake()

    def _break_off(self, error: KatydidError) -> None:
        self._failure = error
        self._let_go()
        self._wake()

    def _let_go(self) -> None:
        self._to_send = []
        for flight in tuple(self._flights):
            self._land(flight)

    def _land(self, flight: Flight) -> None:
        """Hear no more of a flight; what the engine has not ended of it is aborted."""
        self._flights.discard(flight)
        follower, flight.follower = flight.follower, None
        if follower is not None:
            follower.abort()
        dispatch, flight.dispatch = flight.dispatch, None
        if dispatch is not None:
            self._dispatcher.ended(dispatch)
            if flight.running:
                dispatch.abort()
