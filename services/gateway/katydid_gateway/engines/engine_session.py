"""The long-lived stream to one engine: requests down, one frame a step up, taken up again when it breaks.

After a break the session is re-attached under its id within the engine's window, and the engine sends the missing
frames again. A process that refuses connections is gone: its requests are told at once rather than after the window.
Sequence numbers and acknowledgements are in protos/katydid/engine/v1/engine.proto.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import grpc
from katydid.engine.v1 import engine_pb2 as pb
from katydid.engine.v1.engine_pb2_grpc import EngineServiceStub
from katydid_runtime.errors import EngineLostError, KatydidError, UnavailableError
from katydid_runtime.rpc_errors import from_rpc_error

from katydid_gateway.engines.frames import RequestStep, sort_frame
from katydid_gateway.engines.progress import GRAMMAR_S, ProgressWatch
from katydid_gateway.engines.reachability import refuses_connections
from katydid_gateway.engines.submission import Submission
from katydid_gateway.routing.load import RankReport

__all__ = ["EngineListener", "EngineSession", "SessionObserver"]

MAX_REQUEST = 2**32 - 1
ACK_FRAMES = 32
ACK_INTERVAL_S = 0.25
OPEN_TIMEOUT_S = 5.0
BACK_OFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
# After a re-attachment, requests the engine does not list must show up in the frames it sends again.
REPLAY_GRACE_S = 1.0

logger = logging.getLogger(__name__)


class EngineListener(Protocol):
    """A request's side of the session; called from the loop, must not block."""

    def on_step(self, step: RequestStep, arrived_ns: int) -> bool:
        """A frame that came at this `time.monotonic_ns()` concerns this request; returns whether that was its end."""

    def on_lost(self, error: KatydidError) -> None:
        """Nothing more will come: the engine is gone or has forgotten the request."""


class SessionObserver(Protocol):
    """What the session tells about the engine as a whole."""

    def on_connected(self) -> None: ...

    def on_disconnected(self) -> None: ...

    def on_state(self, reports: Mapping[int, RankReport], *, draining: bool, role: pb.Role.ValueType) -> None: ...


class EngineSession:
    """Requests in flight on one engine. `run` keeps the stream up until cancelled."""

    def __init__(
        self,
        name: str,
        address: str,
        channel: grpc.aio.Channel,
        *,
        client: str,
        boot_id: str,
        reattach_window_s: float,
        observer: SessionObserver,
        progress: ProgressWatch,
        abandoned: str = "",
        transport_delay_s: float = 0.0,
    ) -> None:
        self._name = name
        self._address = address
        self._stub = EngineServiceStub(channel)
        self._client = client
        self._boot_id = boot_id
        self._window_s = reattach_window_s
        self._observer = observer
        self._progress = progress
        self._abandoned = abandoned
        self._delay_s = transport_delay_s
        self._listeners: dict[int, EngineListener] = {}
        self._last_request = 0
        self._outbound: asyncio.Queue[pb.SessionRequest | None] | None = None
        self._session_id = ""
        self._last_frame = 0
        self._acked = 0
        self._acked_at = 0.0
        self._broken_at: float | None = None
        self._streams = 0

    @property
    def abandoned(self) -> str:
        """The session with this engine that was given up last, "" for none: the engine may not know yet."""
        return self._abandoned

    @property
    def in_flight(self) -> int:
        """Requests submitted and not ended."""
        return len(self._listeners)

    def submit(
        self,
        submission: Submission,
        listener: EngineListener,
        dp_rank: int,
        timeout_s: float,
        expected_s: float | None = 0.0,
    ) -> int:
        """Send a request whose first token is expected after `expected_s`, None where none is; returns its number in
        the session.

        Raises UnavailableError when the stream is down.
        """
        if self._outbound is None:
            raise UnavailableError(f"engine {self._name} is not connected")
        number = self._next_request()
        request = submission.message(number, dp_rank, timeout_s)
        self._listeners[number] = listener
        grammar_s = GRAMMAR_S if submission.sampling.format is not None else 0.0
        if expected_s is not None:
            self._progress.sent(number, expected_s + grammar_s, time.monotonic())
        self._outbound.put_nowait(request)
        return number

    def abort(self, number: int) -> None:
        """Stop a request and hear no more of it; harmless when it has ended."""
        if self._pop(number) is not None and self._outbound is not None:
            self._outbound.put_nowait(pb.SessionRequest(abort=pb.AbortRequest(request=number)))

    def _next_request(self) -> int:
        """A number of 32 bits that names no request in flight; after the largest it is the turn of 1 again."""
        while True:
            self._last_request = self._last_request % MAX_REQUEST + 1
            if self._last_request not in self._listeners:
                return self._last_request

    async def run(self) -> None:
        """Serve until the session is beyond recovery; then the engine must describe itself anew, it may be another."""
        failures = 0
        try:
            while True:
                opened_before = self._streams
                try:
                    await self._attend()
                except grpc.RpcError as error:
                    logger.warning("session broke", extra={"engine": self._name, "error": str(from_rpc_error(error))})
                except ValueError as error:
                    logger.error("engine broke the protocol", extra={"engine": self._name, "error": str(error)})
                failures = 0 if self._streams > opened_before else failures + 1
                if not self._session_id or await self._beyond_recovery():
                    return
                await asyncio.sleep(_back_off(failures))
        finally:
            self._give_up()

    async def _attend(self) -> None:
        """One stream, from its opening to its end."""
        outbound: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        opening = pb.SessionOpen(
            client=self._client,
            session_id=self._session_id,
            last_frame=self._last_frame,
            abandoned=self._abandoned,
        )
        outbound.put_nowait(pb.SessionRequest(open=opening))
        call = self._stub.Session(self._written(outbound))
        try:
            patience_s = self._patience_s()
            try:
                async with asyncio.timeout(patience_s):
                    frame = await call.read()
            except TimeoutError:
                raise ValueError(f"no answer to the opening within {patience_s:.1f} s") from None
            if not isinstance(frame, pb.SessionResponse) or not frame.HasField("opened"):
                raise ValueError("the first frame does not open the session")
            for number in self._on_opened(frame.opened):
                outbound.put_nowait(pb.SessionRequest(abort=pb.AbortRequest(request=number)))
            self._outbound = outbound
            self._streams += 1
            self._observer.on_connected()
            self._on_frame(frame)
            while isinstance(frame := await call.read(), pb.SessionResponse):
                self._on_frame(frame)
        finally:
            call.cancel()
            # A call that has ended by itself does not cancel the task that asks for what to write next.
            outbound.put_nowait(None)
            if self._outbound is outbound:
                self._outbound = None
                self._broken_at = time.monotonic()
                self._observer.on_disconnected()

    async def _written(self, outbound: asyncio.Queue[pb.SessionRequest | None]) -> AsyncIterator[pb.SessionRequest]:
        while True:
            message = await outbound.get()
            if message is None:
                return
            if self._delay_s and message.HasField("submit"):
                await asyncio.sleep(self._delay_s)
            yield message

    def _on_opened(self, opened: pb.SessionOpened) -> set[int]:
        """Takes the session up; returns requests nobody waits for: their abort was lost with the stream."""
        if opened.boot_id != self._boot_id:
            self._give_up()
            raise ValueError(f"it restarted: boot id {opened.boot_id} instead of {self._boot_id}")
        if opened.session_id == self._session_id:
            running = set(opened.running)
            if absent := self._listeners.keys() - running:
                asyncio.get_running_loop().call_later(REPLAY_GRACE_S, self._lose_absent, frozenset(absent))
        else:
            running = set()
            self._lose(list(self._listeners), _lost(self._name))
            self._session_id, self._last_frame, self._acked = opened.session_id, 0, 0
        self._broken_at = None
        return running - self._listeners.keys()

    def _on_frame(self, frame: pb.SessionResponse) -> None:
        if frame.frame <= self._last_frame:
            return
        if frame.frame != self._last_frame + 1:
            raise ValueError(f"frame {frame.frame} follows frame {self._last_frame}")
        self._last_frame = frame.frame
        arrived_ns = time.monotonic_ns()
        steps = sort_frame(frame)
        if steps:
            self._progress.moved(time.monotonic())
        for number, step in steps.items():
            listener = self._listeners.get(number)
            if listener is not None and listener.on_step(step, arrived_ns):
                self._pop(number)
        if frame.unknown_requests:
            self._lose(list(frame.unknown_requests), _lost(self._name))
        reports = {load.dp_rank: _report(load) for load in frame.loads}
        self._observer.on_state(reports, draining=frame.draining, role=frame.role)
        self._acknowledge()

    def _acknowledge(self) -> None:
        now = time.monotonic()
        behind = self._last_frame - self._acked
        if self._outbound is not None and (behind >= ACK_FRAMES or now - self._acked_at > ACK_INTERVAL_S):
            self._outbound.put_nowait(pb.SessionRequest(ack=pb.FrameAck(frame=self._last_frame)))
            self._acked, self._acked_at = self._last_frame, now

    async def _beyond_recovery(self) -> bool:
        return self._patience_s() <= 0 or await refuses_connections(self._address)

    def _patience_s(self) -> float:
        """How long an opening may take: what is left of the window when requests wait for a re-attachment."""
        if not self._session_id or self._broken_at is None:
            return OPEN_TIMEOUT_S
        return self._window_s - (time.monotonic() - self._broken_at)

    def _give_up(self) -> None:
        self._abandoned = self._session_id or self._abandoned
        self._session_id, self._last_frame, self._acked = "", 0, 0
        self._lose(list(self._listeners), _lost(self._name))

    def _lose_absent(self, absent: frozenset[int]) -> None:
        self._lose([number for number in absent if number in self._listeners], _lost(self._name))

    def _lose(self, numbers: list[int], error: KatydidError) -> None:
        for number in numbers:
            listener = self._pop(number)
            if listener is not None:
                listener.on_lost(error)

    def _pop(self, number: int) -> EngineListener | None:
        self._progress.ended(number, time.monotonic())
        return self._listeners.pop(number, None)


def _lost(name: str) -> EngineLostError:
    return EngineLostError(f"engine {name} was lost while it worked on the request")


def _report(load: pb.RankLoad) -> RankReport:
    return RankReport(
        running=load.running,
        waiting=load.waiting,
        uncached_tokens=load.waiting_uncached_tokens,
        prefill_speed=load.prefill_tokens_per_second,
        decode_speed=load.decode_tokens_per_second,
        free_pages=load.free_pages,
        total_pages=load.total_pages,
    )


def _back_off(failures: int) -> float:
    return BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)] * random.uniform(0.75, 1.25)
