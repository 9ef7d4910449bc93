"""Puts a prepared request on its way: in its turn the first time, at once after an engine failed, and in mid-answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from katydid_runtime.telemetry import Telemetry

from katydid_gateway.dispatch import Dispatch, Dispatcher
from katydid_gateway.flight import Flight, Part
from katydid_gateway.flow.control import FlowControl
from katydid_gateway.preparation import Prepared
from katydid_gateway.prompt_hashes import PromptHashes
from katydid_gateway.request_clock import RequestClock
from katydid_gateway.routing.router import Candidate
from katydid_gateway.text.model_text import EncodedPrompt

__all__ = ["Sender"]


class Sender:
    """`delays_s` holds what a test adds to the phase `route`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        flow: FlowControl,
        hashes: PromptHashes,
        telemetry: Telemetry,
        delays_s: Mapping[str, float],
    ) -> None:
        self._dispatcher = dispatcher
        self._flow = flow
        self._hashes = hashes
        self._telemetry = telemetry
        self._delay_s = delays_s.get("route", 0.0)

    async def send(self, prepared: Prepared, flight: Flight, failed: set[str], clock: RequestClock) -> Dispatch:
        """Send a flight to the best engine that is not named in `failed`.

        Raises UnavailableError when there is none, QuotaExceededError or OverloadedError when it is not taken.
        """
        if flight.part is not None:
            return self._resume(prepared, flight, flight.part, failed, clock)
        if flight.attempt > 1:
            candidate = await self._route(prepared, failed, clock)
            dispatch = self._dispatch(prepared, candidate, flight, clock)
        else:
            dispatch = await self._admit(prepared, flight, clock)
        clock.submitted(dispatch.engine)
        return dispatch

    async def _admit(self, prepared: Prepared, flight: Flight, clock: RequestClock) -> Dispatch:
        self._dispatcher.came()
        candidate = await self._route(prepared, (), clock)
        tenant, priority = prepared.tenant, prepared.submission.options.priority
        admission = self._flow.admit(tenant, priority, candidate.prediction, prepared.timeout_s)
        prepared.admissions.append(admission)
        if self._flow.gate.open:
            return self._dispatch(prepared, candidate, flight, clock)
        began = time.monotonic_ns()
        async with self._flow.turn(admission):
            clock.add("admission", time.monotonic_ns() - began)
            return self._dispatch(prepared, await self._route(prepared, (), clock), flight, clock)

    async def _route(self, prepared: Prepared, failed: Collection[str], clock: RequestClock) -> Candidate:
        with clock.phase("route"), self._telemetry.start("gateway.route", clock.span.context) as span:
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            return self._dispatcher.decide(prepared.routed(), span, failed)

    def _dispatch(self, prepared: Prepared, candidate: Candidate, flight: Flight, clock: RequestClock) -> Dispatch:
        submission = prepared.submission
        flight.hands_off = candidate.partner is not None and submission.sampling.max_tokens > 1
        with clock.phase("prepare"):
            routed, timeout_s = prepared.routed(), prepared.timeout_s
            if not flight.hands_off:
                return self._dispatcher.send(routed, submission, candidate, flight, timeout_s)
            dispatch = self._dispatcher.send(routed, submission.prompt_only(), candidate, flight, timeout_s)
            flight.follower = self._dispatcher.follow(routed, submission, candidate, timeout_s)
            return dispatch

    def _resume(
        self, prepared: Prepared, flight: Flight, part: Part, failed: set[str], clock: RequestClock
    ) -> Dispatch:
        """One choice by itself, behind what it has said: after its engine was lost, or has computed its prompt."""
        submission = prepared.submission.continued(part.choice, part.generated)
        options = submission.options
        name = "gateway.hand_off" if flight.giver else "gateway.resume"
        with self._telemetry.start(name, clock.span.context) as span:
            whole = EncodedPrompt(submission.prompt_ids + part.generated, "", known=prepared.encoded.known)
            salt = submission.cache_salt
            routed = self._hashes.routed(whole, options.prompt_cache_key, salt, bypass=not submission.reads_cache)
            candidate = self._dispatcher.decide(routed, span, failed, after=flight.giver)
            span.set_all({"resume.choice": part.choice, "resume.generated_tokens": len(part.generated) // 4})
            if flight.giver and submission.reads_cache:
                last_s = self._dispatcher.last_blocks_s(routed, candidate, flight.giver)
                submission = replace(submission, blocks_within_s=last_s)
            dispatch = self._dispatcher.send(routed, submission, candidate, flight, prepared.timeout_s)
        clock.moved(dispatch.engine)
        return dispatch
