"""The loop that turns: take messages, plan, run, commit, report. It never waits for the cache service or the face.

Idle, it sleeps on its channel, reports that it lives twice a second, and checks its own books once.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from katydid_engine.block_pool import BlockPool, IntegrityError
from katydid_engine.channel import BlockingChannel
from katydid_engine.faults import FaultDelays
from katydid_engine.messages import (
    Abort,
    Alive,
    Flush,
    KvArrived,
    KvFound,
    KvGranted,
    KvWriteSlotsFree,
    Load,
    Profile,
    Reply,
    SetKv,
    StepReport,
    Stop,
    Submit,
    ToWorker,
)
from katydid_engine.plan import StepOutput, StepPlan
from katydid_engine.request import Request
from katydid_engine.scheduler import Scheduler
from katydid_engine.speed import Speed
from katydid_engine.step_thread import Inline, StepThread

__all__ = ["ALIVE_S", "Peers", "Profiler", "StepLoop"]

ALIVE_S = 0.5
_CHECK_AFTER_S = 1.0

# What a step brought, how long it took, and whether a profile is complete with it.
_CarriedOut = tuple[StepOutput, float, bool]

logger = logging.getLogger(__name__)


class Profiler(Protocol):
    """Records steps into a file."""

    def start(self, steps: int, path: str) -> None:
        """Raises RuntimeError while a profile is being recorded."""
        ...

    def step_done(self) -> bool:
        """To be called after every step; True when that one completed a profile and the file is written."""
        ...


class Peers(Protocol):
    """Groups that forward together with this one."""

    @property
    def patience_s(self) -> float:
        """How long they may have to wait for this one."""
        ...

    def idle(self) -> None:
        """Takes part, without a plan, in what they compute now, if they do."""
        ...


class StepLoop:
    """The first rank's loop. ``publish`` hands a plan to the other ranks; ``run`` carries it out on this one;
    ``prepare`` hears of each request when it comes. With a ``thread`` the next step is planned while one
    runs there. With ``launch`` it is planned while a device carries one out: that begins a step and returns what waits
    for its output, to be called in order. Without both every step runs where it was planned."""

    def __init__(
        self,
        channel: BlockingChannel,
        scheduler: Scheduler,
        pool: BlockPool,
        *,
        run: Callable[[StepPlan], StepOutput],
        publish: Callable[[StepPlan], None],
        prepare: Callable[[Request], None],
        profiler: Profiler,
        peers: Peers | None = None,
        faults: FaultDelays = FaultDelays(),
        thread: StepThread | None = None,
        launch: Callable[[StepPlan], Callable[[], StepOutput]] | None = None,
    ) -> None:
        self._channel = channel
        self._scheduler = scheduler
        self._pool = pool
        self._run = run
        self._publish = publish
        self._prepare = prepare
        self._profiler = profiler
        self._peers = peers
        self._profile_call = 0
        self._profile_path = ""
        self._faults = faults
        self._thread = thread or Inline()
        self._launch = launch
        self._ahead = thread is not None or launch is not None
        self._under_way: deque[tuple[StepPlan, Callable[[], _CarriedOut]]] = deque()
        self._speed = Speed()
        self._stopped = False
        self._reported = Load()
        self._alive_at = 0.0
        self._idle_since: float | None = None
        self._checked = False

    def run(self) -> None:
        """Turns until told to stop. Raises ChannelClosed when the face is gone, and whatever a step raises."""
        while not self._stopped:
            for message in self._channel.receive(self._patience_s()):
                self._take(message)
            self._turn()

    def _turn(self) -> None:
        plan = self._scheduler.schedule()
        if plan is not None:
            self._idle_since = None
            self._publish(plan)
            self._under_way.append((plan, self._begin(plan)))
        # A step ahead of the one that runs is planned; a third waits for what that one samples.
        if len(self._under_way) > (plan is not None and self._ahead):
            self._finish(*self._under_way.popleft())
        elif plan is None:
            if self._peers is not None:
                self._peers.idle()
            self._idle()

    def _begin(self, plan: StepPlan) -> Callable[[], _CarriedOut]:
        if self._launch is None:
            return self._thread.submit(self._carry_out, plan).result
        return functools.partial(self._await, plan, time.monotonic(), self._launch(plan))

    def _await(self, plan: StepPlan, launched: float, output: Callable[[], StepOutput]) -> _CarriedOut:
        """The device may carry out the step before when this one is launched."""
        result = output()
        self._delay(plan)
        return result, result.seconds(time.monotonic() - launched), self._profiler.step_done()

    def _delay(self, plan: StepPlan) -> None:
        if plan.runs:
            time.sleep(self._faults.prefill if plan.num_prefill_tokens else self._faults.decode)

    def _carry_out(self, plan: StepPlan) -> _CarriedOut:
        started = time.monotonic()
        output = self._run(plan)
        self._delay(plan)
        elapsed = time.monotonic() - started
        return output, elapsed, self._profiler.step_done()

    def _finish(self, plan: StepPlan, carried_out: Callable[[], _CarriedOut]) -> None:
        output, elapsed, profiled = carried_out()
        self._scheduler.commit(plan, output)
        self._scheduler.took(plan, elapsed)
        decoded = sum(
            len(tokens) for row, tokens in zip(plan.samples, output.tokens, strict=True) if row.run < plan.num_decodes
        )
        self._speed.note(plan.num_prefill_tokens, decoded, elapsed)
        self._report(plan.num_prefill_tokens + plan.num_decodes * plan.decode_q_len, elapsed)
        if profiled:
            self._channel.send(Reply(self._profile_call, self._profile_path))

    def _idle(self) -> None:
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since, self._checked = now, False
        if not self._checked and now - self._idle_since >= _CHECK_AFTER_S:
            self._check_books()
        self._report(0, 0.0)
        if now - self._alive_at >= ALIVE_S:
            self._channel.send(Alive())
            self._alive_at = now

    def _report(self, computed_tokens: int, elapsed: float) -> None:
        outcome = self._scheduler.take_outcome()
        load = self._speed.fill(self._scheduler.load())
        if not outcome and not computed_tokens and load == self._reported:
            return
        self._reported = load
        self._channel.send(
            StepReport(
                load,
                outcome.tokens,
                outcome.first_tokens,
                outcome.ends,
                outcome.blocks,
                outcome.kv,
                computed_tokens,
                outcome.drafted,
                outcome.accepted,
                elapsed,
            )
        )

    def _patience_s(self) -> float:
        """How long the loop may sleep: not at all while steps follow each other."""
        if self._idle_since is None:
            return 0.0
        wake = self._scheduler.next_wake()
        patience = ALIVE_S if self._peers is None else min(ALIVE_S, self._peers.patience_s)
        return patience if wake is None else min(patience, max(0.0, wake - time.monotonic()))

    def _take(self, message: ToWorker) -> None:
        match message:
            case Submit(request):
                self._prepare(request)
                self._scheduler.add(request)
            case Abort(handle):
                self._scheduler.abort(handle)
            case KvFound():
                self._scheduler.kv_found(message)
            case KvArrived():
                self._scheduler.kv_arrived(message)
            case KvWriteSlotsFree(slots):
                self._scheduler.kv.free_write_slots(slots)
            case KvGranted():
                self._scheduler.kv.granted(message)
            case SetKv(attached, in_place):
                self._scheduler.kv.set_attached(attached, in_place)
            case Flush(call):
                self._channel.send(Reply(call, self._pool.flush()))
            case Profile(call, steps, path):
                self._start_profile(call, steps, path)
            case Stop():
                self._stopped = True

    def _start_profile(self, call: int, steps: int, path: str) -> None:
        try:
            self._thread.submit(self._profiler.start, steps, path).result()
        except RuntimeError as error:
            self._channel.send(Reply(call, str(error), failed=True))
        else:
            self._profile_call, self._profile_path = call, path

    def _check_books(self) -> None:
        self._checked = True
        try:
            self._scheduler.check_integrity()
        except IntegrityError:
            # A self-check must not kill a serving process; tests call the same check and do fail.
            logger.exception("the scheduler's books are wrong")
