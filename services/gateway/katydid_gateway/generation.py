"""From a request to its answer, the one path that HTTP and gRPC share:

    check -> tokenise -> resolve sampling -> hash -> route -> submit -> text

under one `gateway.request` span, one deadline and one place in the in-flight count.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

from katydid_runtime import log
from katydid_runtime.block_hash import ChainKey, split_hashes, unpack_ids
from katydid_runtime.errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidRequestError,
    KatydidError,
    OverloadedError,
    RequestAbortedError,
)
from katydid_runtime.telemetry import Telemetry

from katydid_gateway.answer import Answer
from katydid_gateway.api_keys import ApiKeys
from katydid_gateway.capture import Capture
from katydid_gateway.chain_cache import ChainCache
from katydid_gateway.choice_stream import ChoiceStream
from katydid_gateway.dispatch import Dispatch, Dispatcher
from katydid_gateway.engines.fleet import Fleet
from katydid_gateway.engines.submission import Submission
from katydid_gateway.flight import Flight, Part
from katydid_gateway.flow.control import Admission, FlowControl
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.request_clock import RequestClock
from katydid_gateway.requests import Caller, GenerationRequest, Prompt, Sampling, TokenPrompt, Usage
from katydid_gateway.routing.router import Candidate, Decision, RoutedPrompt
from katydid_gateway.settings import GatewaySettings
from katydid_gateway.text.choice_text import ChoiceText
from katydid_gateway.text.model_text import EncodedPrompt, ModelText
from katydid_gateway.validation import check_model, check_options, check_prompt, resolve_sampling

__all__ = ["Generator"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that can be sent: checked and tokenised; `routed` hashes it, once."""

    request_id: str
    model: str
    encoded: EncodedPrompt
    sampling: Sampling
    routed: Callable[[], RoutedPrompt]
    submission: Submission
    deadline_ns: int
    tenant: str
    admissions: list[Admission]

    @property
    def timeout_s(self) -> float:
        return (self.deadline_ns - time.time_ns()) / 1e9


class Generator:
    """Answers requests. `draining` set true refuses new ones; `idle` is set while none is in flight."""

    def __init__(
        self,
        settings: GatewaySettings,
        text: ModelText,
        fleet: Fleet,
        keys: ApiKeys,
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
        self._secret = settings.cache_salt_secret
        self._telemetry = telemetry
        self._metrics = metrics
        self._capture = capture
        self._chains = ChainCache(settings.chain_cache_bytes)
        self._dispatcher = Dispatcher(fleet, metrics)
        self.flow = FlowControl(
            fleet.router,
            keys.terms,
            metrics,
            engine_queue_s=settings.engine_queue_s,
            max_queued=settings.max_queued,
            ttft_limit_s=settings.ttft_limit_s,
        )
        self._in_flight = 0
        self._answers: set[Answer] = set()

    @asynccontextmanager
    async def answer(self, request: GenerationRequest, caller: Caller, api: str) -> AsyncIterator[Answer]:
        """The answer to `request`, which its `batches` send; leaving the block early aborts it on the engine.

        Raises InvalidRequestError and its kind for what the caller did wrong, OverloadedError and DrainingError when
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
            clock = RequestClock(self._telemetry, span, caller.received_ns)
            answer: Answer | None = None
            prepared: _Prepared | None = None
            timer: asyncio.TimerHandle | None = None
            try:
                encoded = await self._tokenise(request, clock)
                with clock.phase("prepare"):
                    prepared = self._prepare(request, encoded, request_id, caller, clock)
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
                self._finish(answer, clock, api, outcome, caller.tenant)
                if prepared is not None and answer is not None:
                    used = answer.usage
                    if self._capture is not None and answer.tokens:
                        chain = prepared.routed().chain
                        self._capture.finished(caller.received_ns, chain, used.prompt_tokens, used.completion_tokens)
                    for admission in prepared.admissions:
                        self.flow.settle(admission, used.computed_tokens if answer.tokens else 0)

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
        self, model: str, prompt: Prompt, affinity: str, tenant: str, without: str
    ) -> tuple[RoutedPrompt, Decision]:
        """Where the prompt would go now, without sending it; `without` leaves an engine out."""
        if without and without not in self.fleet.connections:
            raise InvalidRequestError(
                f"there is no engine {without!r}",
                field="without_engine",
                value=without,
                allowed=", ".join(self.fleet.connections),
            )
        encoded = await self.encode(model, prompt)
        routed = self._routed(encoded.ids, affinity, self._salt(tenant), bypass=False)
        return routed, self.fleet.router.decide(routed, time.monotonic(), {without} if without else ())

    async def _tokenise(self, request: GenerationRequest, clock: RequestClock) -> EncodedPrompt:
        check_model(request.model, self.fleet.limits)
        check_prompt(request.prompt, self.fleet.limits)
        clock.received()
        with clock.phase("tokenise"):
            await self._delayed("tokenise")
            return await self.text.encode(request.prompt)

    def _prepare(
        self, request: GenerationRequest, encoded: EncodedPrompt, request_id: str, caller: Caller, clock: RequestClock
    ) -> _Prepared:
        limits = self.fleet.limits
        sampling = resolve_sampling(request.sampling, self.text.defaults, limits, encoded.tokens)
        salt = self._salt(caller.tenant)
        options = request.options
        submission = Submission(
            request_id=request_id,
            prompt_ids=encoded.ids,
            sampling=sampling,
            options=options,
            trace=clock.span.context,
            cache_salt=salt,
            public_blocks=self._settings.public_blocks if salt else 0,
            tenant=sha256(caller.tenant.encode()).digest()[:16] if caller.tenant else b"",
        )
        clock.span.set_all(
            {"request.prompt_tokens": encoded.tokens, "request.n": sampling.n, "request.model": limits.model}
        )
        longest_s = self._settings.request_timeout_s
        timeout_s = longest_s if caller.timeout_s is None else min(caller.timeout_s, longest_s)
        deadline_ns = caller.received_ns + int(timeout_s * 1e9)
        return _Prepared(
            request_id=request_id,
            model=limits.model,
            encoded=encoded,
            sampling=sampling,
            routed=cache(lambda: self._routed(encoded.ids, options.prompt_cache_key, salt, options.bypass_cache)),
            submission=submission,
            deadline_ns=deadline_ns,
            tenant=caller.tenant,
            admissions=[],
        )

    def _open(self, prepared: _Prepared, prompt: Prompt, clock: RequestClock) -> Answer:
        sampling, text = prepared.sampling, self.text
        choices = [
            ChoiceStream(
                index,
                ChoiceText(
                    text.vocabulary.detokenizer(skip_special=True),
                    stops=sampling.stop,
                    include_stop=sampling.include_stop,
                    min_tokens=sampling.min_tokens,
                ),
                text.parser(prompt, prepared.encoded.text),
                text.vocabulary,
                include_stop=sampling.include_stop,
            )
            for index in range(sampling.n)
        ]

        async def send(flight: Flight, failed: set[str]) -> Dispatch:
            if (part := flight.part) is not None:
                return await self._resume(prepared, flight, part, failed, clock)
            if flight.attempt > 1:
                candidate = await self._route(prepared, failed, clock)
                dispatch = self._dispatch(prepared, candidate, flight)
            else:
                dispatch = await self._admit(prepared, flight, clock)
            clock.submitted(dispatch.engine)
            return dispatch

        return Answer(
            request_id=prepared.request_id,
            model=prepared.model,
            prompt_ids=prepared.encoded.ids,
            prompt_text=prepared.encoded.text,
            choices=choices,
            vocabulary=text.vocabulary,
            dispatcher=self._dispatcher,
            clock=clock,
            buffer_bytes=self._settings.client_buffer_bytes,
            send=send,
            resume=self._settings.resume,
        )

    async def _admit(self, prepared: _Prepared, flight: Flight, clock: RequestClock) -> Dispatch:
        """Send a request for the first time, when its turn has come."""
        candidate = await self._route(prepared, (), clock)
        tenant, priority = prepared.tenant, prepared.submission.options.priority
        admission = self.flow.admit(tenant, priority, candidate.prediction, prepared.timeout_s)
        prepared.admissions.append(admission)
        if self.flow.gate.open:
            return self._dispatch(prepared, candidate, flight)
        began = time.monotonic_ns()
        async with self.flow.turn(admission):
            clock.add("admission", time.monotonic_ns() - began)
            return self._dispatch(prepared, await self._route(prepared, (), clock), flight)

    async def _route(self, prepared: _Prepared, failed: Collection[str], clock: RequestClock) -> Candidate:
        with clock.phase("route"), self._telemetry.start("gateway.route", clock.span.context) as span:
            await self._delayed("route")
            return self._dispatcher.decide(prepared.routed(), span, failed)

    def _dispatch(self, prepared: _Prepared, candidate: Candidate, flight: Flight) -> Dispatch:
        return self._dispatcher.send(prepared.routed(), prepared.submission, candidate, flight, prepared.timeout_s)

    async def _resume(
        self, prepared: _Prepared, flight: Flight, part: Part, failed: set[str], clock: RequestClock
    ) -> Dispatch:
        """Send one choice on its way again, behind what it has said."""
        submission = prepared.submission.continued(part.choice, part.generated)
        options = submission.options
        with self._telemetry.start("gateway.resume", clock.span.context) as span:
            ids = submission.prompt_ids + part.generated
            routed = self._routed(ids, options.prompt_cache_key, submission.cache_salt, options.bypass_cache)
            candidate = self._dispatcher.decide(routed, span, failed)
            span.set_all({"resume.choice": part.choice, "resume.generated_tokens": len(part.generated) // 4})
            dispatch = self._dispatcher.send(routed, submission, candidate, flight, prepared.timeout_s)
        clock.moved(dispatch.engine)
        return dispatch

    def _routed(self, ids: bytes, affinity: str, salt: bytes, bypass: bool) -> RoutedPrompt:
        chain = b""
        if not bypass:
            public = self._settings.public_blocks if salt else 0
            chain = self._chains.chain(ids, ChainKey(self.fleet.identity, salt=salt, public_blocks=public))
        digest = b"" if chain else sha256(ids).digest()
        return RoutedPrompt(tuple(split_hashes(chain)), len(ids) // 4, affinity, digest)

    def _salt(self, tenant: str) -> bytes:
        if self._secret is None or not tenant:
            return b""
        return hmac.digest(self._secret.get_secret_value().encode(), tenant.encode(), "sha256")

    async def _delayed(self, point: str) -> None:
        if self._delays_s and (delay_s := self._delays_s.get(point)):
            await asyncio.sleep(delay_s)

    def _finish(self, answer: Answer | None, clock: RequestClock, api: str, outcome: str, tenant: str) -> None:
        self._metrics.finished.labels(api, outcome).inc()
        if answer is None:
            self._metrics.ended(tenant, outcome, Usage(0, 0))
            logger.info("request refused", extra={"api": api, "outcome": outcome})
            return
        self._answers.discard(answer)
        answer.close()
        usage, tokens = answer.usage, answer.tokens
        self._metrics.settled(usage)
        self._metrics.ended(tenant, outcome, usage)
        clock.export(tokens, answer.trace)
        if clock.ttft_s:
            self._metrics.answered(clock.ttft_s, clock.tpot_s(tokens), tokens, clock.trace_id)
            for name, seconds in clock.phases_s.items():
                self._metrics.phase.labels(name).observe(max(0.0, seconds))
        clock.span.set_all(
            {
                "request.outcome": outcome,
                "request.engine": clock.engine,
                "request.output_tokens": usage.completion_tokens,
                "request.cached_tokens": usage.cached.total,
                "request.resumes": answer.resumes,
            }
        )
        logger.info(
            "request finished",
            extra={
                "api": api,
                "outcome": outcome,
                "engine": clock.engine,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached.total,
                "output_tokens": usage.completion_tokens,
                "ttft_ms": round(clock.ttft_s * 1e3, 1),
                "tpot_ms": round(clock.tpot_s(tokens) * 1e3, 2),
            },
        )

    @contextmanager
    def _counted(self, api: str) -> Iterator[None]:
        if self.draining:
            self._metrics.finished.labels(api, DrainingError.reason.lower()).inc()
            raise DrainingError("the gateway is shutting down")
        if self._in_flight >= self._settings.max_requests:
            self._metrics.finished.labels(api, OverloadedError.reason.lower()).inc()
            raise OverloadedError(
                f"{self._in_flight} requests are in flight, the most this gateway takes", retry_after_s=1.0
            )
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
