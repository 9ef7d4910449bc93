"""From a request to its answer, the one path that HTTP and gRPC share:

    check -> tokenise -> resolve sampling -> hash -> route -> submit -> text

under one `gateway.request` span, one deadline and one place in the in-flight count.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from katydid_runtime import log
from katydid_runtime.block_hash import unpack_ids
from katydid_runtime.errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidRequestError,
    KatydidError,
    RequestAbortedError,
)
from katydid_runtime.telemetry import Telemetry

from katydid_gateway.access.door import Door
from katydid_gateway.answer import Answer
from katydid_gateway.capture import Capture
from katydid_gateway.dispatch import Dispatcher
from katydid_gateway.engines.fleet import Fleet
from katydid_gateway.flow.control import FlowControl
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.preparation import Prepared, Preparer
from katydid_gateway.prompt_hashes import PromptHashes
from katydid_gateway.recent_requests import RecentRequests
from katydid_gateway.request_clock import RequestClock
from katydid_gateway.request_record import record_finished
from katydid_gateway.requests import Caller, GenerationRequest, Prompt, TokenPrompt
from katydid_gateway.routing.router import Decision, RoutedPrompt
from katydid_gateway.sending import Sender
from katydid_gateway.settings import GatewaySettings
from katydid_gateway.text.model_text import EncodedPrompt, ModelText
from katydid_gateway.validation import check_model, check_options, check_prompt

__all__ = ["Generator"]


class Generator:
    """Answers requests. `draining` set true refuses new ones; `idle` is set while none is in flight."""

    def __init__(
        self,
        settings: GatewaySettings,
        text: ModelText,
        fleet: Fleet,
        door: Door,
        telemetry: Telemetry,
        metrics: GatewayMetrics,
        capture: Capture | None = None,
    ) -> None:
        self.text = text
        self.fleet = fleet
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._settings = settings
        self._delays_s = settings.fault_delays
        self._telemetry = telemetry
        self._metrics = metrics
        self._capture = capture
        self._hashes = PromptHashes(settings, fleet)
        self._preparer = Preparer(settings, text, fleet, self._hashes)
        self._dispatcher = Dispatcher(fleet, metrics)
        self.flow = FlowControl(
            fleet.router,
            door.terms,
            metrics,
            engine_queue_s=settings.engine_queue_s,
            max_queued=settings.max_queued,
            ttft_limit_s=settings.ttft_limit_s,
        )
        self._sender = Sender(self._dispatcher, self.flow, self._hashes, telemetry, settings.fault_delays)
        self.recent = RecentRequests()
        self._in_flight = 0
        self._answers: set[Answer] = set()

    @property
    def in_flight(self) -> int:
        """Requests being answered now."""
        return self._in_flight

    @asynccontextmanager
    async def answer(self, request: GenerationRequest, caller: Caller, api: str) -> AsyncIterator[Answer]:
        """The answer to `request`, which its `batches` send; leaving the block early aborts it on the engine.

        Raises InvalidRequestError and its kind for what the caller did wrong, DrainingError and OverloadedError when
        this gateway will not take it; `batches` raise UnavailableError when no engine can.
        """
        check_options(request.options)
        request_id = request.options.request_id or f"req-{uuid.uuid4().hex}"
        outcome = "internal"
        with (
            log.bind(request=request_id),
            self._counted(api),
            self._telemetry.start(
                "gateway.request",
                caller.trace,
                start_ns=caller.received_ns,
                attributes={"request.id": request_id, "request.api": api},
            ) as span,
        ):
            clock = RequestClock(self._telemetry, span, caller.received_ns, caller.began_ns)
            answer: Answer | None = None
            prepared: Prepared | None = None
            timer: asyncio.TimerHandle | None = None
            try:
                encoded = await self._tokenise(request, clock)
                with clock.phase("prepare"):
                    prepared = self._preparer.prepare(request, encoded, request_id, caller, clock)
                    answer = self._open(prepared, request.prompt, clock)
                    self._answers.add(answer)
                timer = asyncio.get_running_loop().call_later(
                    max(0.0, prepared.timeout_s),
                    answer.fail,
                    DeadlineExceededError("the request's deadline has passed"),
                )
                yield answer
                outcome = "ok" if answer.ended else "left"
            except KatydidError as error:
                outcome = error.reason.lower()
                raise
            except (asyncio.CancelledError, GeneratorExit):
                outcome = RequestAbortedError.reason.lower()
                raise
            finally:
                if timer is not None:
                    timer.cancel()
                if prepared is not None and answer is not None:
                    self._settle(prepared, answer, caller)
                    self.recent.finished(
                        caller.tenant, request_id, clock, answer.usage, answer.tokens, api=api, outcome=outcome
                    )
                record_finished(self._metrics, answer, clock, api=api, outcome=outcome, tenant=caller.tenant)

    def cut(self) -> None:
        """End every answer in flight with DrainingError: the time to finish them is over."""
        for answer in tuple(self._answers):
            answer.fail(DrainingError("the gateway stopped before the answer was complete"))

    async def encode(self, model: str, prompt: Prompt) -> EncodedPrompt:
        """A prompt's token ids. Raises InvalidRequestError and its kind."""
        check_model(model, self.fleet.limits)
        check_prompt(prompt, self.fleet.limits)
        return await self.text.encode(prompt)

    def decode(self, model: str, ids: bytes) -> str:
        """Text of token ids, special tokens included. Raises InvalidRequestError and its kind."""
        check_model(model, self.fleet.limits)
        if not ids:
            return ""
        check_prompt(TokenPrompt(ids), self.fleet.limits)
        return self.text.vocabulary.decode(unpack_ids(ids), skip_special=False)

    async def explain(
        self, model: str, prompt: Prompt, affinity: str, tenant: str, *, without: str, another: bool
    ) -> tuple[RoutedPrompt, Decision]:
        """Where the prompt would go now, without sending it; `without` leaves an engine out, `another` imagines one."""
        if without and without not in self.fleet.connections:
            raise InvalidRequestError(
                f"there is no engine {without!r}",
                field="without_engine",
                value=without,
                allowed=", ".join(self.fleet.connections),
            )
        encoded = await self.encode(model, prompt)
        routed = self._hashes.routed(encoded, affinity, self._hashes.salt(tenant), bypass=False)
        left_out = {without} if without else ()
        return routed, self.fleet.router.decide(routed, time.monotonic(), left_out, another=another)

    async def _tokenise(self, request: GenerationRequest, clock: RequestClock) -> EncodedPrompt:
        check_model(request.model, self.fleet.limits)
        check_prompt(request.prompt, self.fleet.limits)
        clock.received()
        with clock.phase("tokenise"):
            if self._delays_s and (delay_s := self._delays_s.get("tokenise")):
                await asyncio.sleep(delay_s)
            return await self.text.encode(request.prompt, self.fleet.limits.max_model_tokens)

    def _open(self, prepared: Prepared, prompt: Prompt, clock: RequestClock) -> Answer:
        format = prepared.sampling.format
        return Answer(
            request_id=prepared.request_id,
            model=prepared.model,
            prompt_ids=prepared.encoded.ids,
            prompt_text=prepared.encoded.text,
            choices=self._preparer.choices(prepared, prompt),
            vocabulary=self.text.vocabulary,
            dispatcher=self._dispatcher,
            clock=clock,
            buffer_bytes=self._settings.client_buffer_bytes,
            send=lambda flight, failed: self._sender.send(prepared, flight, failed, clock),
            resume=self._settings.resume,
            grammar_field=format.field if format is not None else "",
        )

    def _settle(self, prepared: Prepared, answer: Answer, caller: Caller) -> None:
        """The request has ended: nothing of it is left on an engine, and what it used is known."""
        self._answers.discard(answer)
        answer.close()
        used = answer.usage
        if self._capture is not None and answer.tokens:
            chain = prepared.routed().chain
            self._capture.finished(caller.received_ns, chain, used.prompt_tokens, used.completion_tokens)
        for admission in prepared.admissions:
            self.flow.settle(admission, used.computed_tokens if answer.tokens else 0)

    @contextmanager
    def _counted(self, api: str) -> Iterator[None]:
        if self.draining:
            self._metrics.finished.labels(api, DrainingError.reason.lower()).inc()
            raise DrainingError("the gateway is shutting down")
        self._in_flight += 1
        self._metrics.in_flight.inc()
        self.idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.dec()
            if not self._in_flight:
                self.idle.set()
