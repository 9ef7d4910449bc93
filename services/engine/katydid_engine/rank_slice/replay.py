"""Replays agents through the engine's scheduler: on a slice in real time, or by measured step times in simulated time;
or first the one and then the other, so that a slice need not be held for the minutes that it takes until caches and
queues are as they stay.

What is replayed is the scheduler of a TP group, with its pages and its prefix cache: a prompt's known blocks are those
that still lie in its pages. The gateway and the cache service are not there.
"""

from __future__ import annotations

import heapq
import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from katydid_runtime.block_hash import ChainKey

from katydid_engine.plan import Moved, StepOutput, StepPlan
from katydid_engine.rank_slice.agents import Session
from katydid_engine.rank_slice.replay_arena import ReplayArena
from katydid_engine.request import Request, Sampling
from katydid_engine.scheduler import Scheduler

__all__ = ["Answer", "Clock", "Clocks", "Executor", "Replay", "Simulated", "WallClock"]

_PATIENCE_S = 1e-3
_KEY = ChainKey(b"\0" * 32)


class Clock(Protocol):
    """Seconds; ``wait_until`` comes back at that time, or later."""

    def __call__(self) -> float: ...

    def wait_until(self, when: float) -> None: ...


class WallClock:
    """Real time, which is ``since`` now."""

    def __init__(self, since: float = 0.0) -> None:
        self._started = time.perf_counter() - since

    def __call__(self) -> float:
        return time.perf_counter() - self._started

    def wait_until(self, when: float) -> None:
        time.sleep(max(0.0, when - self()))


class Clocks:
    """One clock, and later another in its place."""

    def __init__(self, clock: Clock) -> None:
        self.present = clock

    def __call__(self) -> float:
        return self.present()

    def wait_until(self, when: float) -> None:
        self.present.wait_until(when)


class Executor(Protocol):
    """Carries out plans: ``begin`` one while another runs, or not (``ahead`` says how many more)."""

    @property
    def ahead(self) -> int: ...

    def begin(self, plan: StepPlan) -> Callable[[], tuple[StepOutput, float]]:
        """What comes of it, and how long it took."""
        ...

    def expect(self, request: Request) -> None:
        """A request has come."""
        ...


class Times(Protocol):
    """Seconds of a step."""

    def of(self, plan: StepPlan) -> float: ...


class Simulated:
    """A clock that a step moves on by its time; tokens are drawn."""

    ahead = 0

    def __init__(self, times: Times, vocabulary: int) -> None:
        self._times = times
        self._now = 0.0
        self._tokens = itertools.cycle(range(2, vocabulary))

    def __call__(self) -> float:
        return self._now

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)

    def expect(self, request: Request) -> None:
        """Nothing to do."""

    def begin(self, plan: StepPlan) -> Callable[[], tuple[StepOutput, float]]:
        seconds = self._times.of(plan) if plan.runs else 0.0
        self._now += seconds
        tokens = tuple(array("I", (next(self._tokens),)) for _ in plan.samples)
        packed, unpacked = (
            (Moved(plan.number, (0,) * len(moves)),) if moves else () for moves in (plan.packs, plan.unpacks)
        )
        output = StepOutput(tokens, (0,) * len(tokens), packed=packed, unpacked=unpacked)
        return lambda: (output, seconds)


@dataclass(slots=True)
class Answer:
    """One request as its client saw it; seconds.

    Attributes:
        asked_at: when it came.
        times: when each token came.
    """

    asked_at: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    times: list[float] = field(default_factory=list)
    done: bool = False

    @property
    def ttft(self) -> float:
        return self.times[0] - self.asked_at

    @property
    def tpot(self) -> float:
        """Mean time of a token after the first; 0 of a single one."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else 0.0

    def late(self, now: float, ttft_s: float) -> bool:
        """Whether it has waited too long for its first token already."""
        return not self.times and now - self.asked_at >= ttft_s


@dataclass(slots=True)
class _Open:
    """A request that is not answered yet, with the tokens that have come."""

    session: Session
    request: Request
    answer: Answer
    tokens: array[int] = field(default_factory=lambda: array("I"))


class Replay:
    """One run of sessions through a scheduler; prompts may be ``sparse``. Blocks go to an ``arena`` and come from it,
    where there is one; ``forget`` is called when a request ends."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        *,
        sparse: bool = False,
        arena: ReplayArena | None = None,
        forget: Callable[[], object] = lambda: None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._sparse = sparse
        self._arena = arena
        self._forget = forget
        if arena is not None:
            arena.attach(scheduler)
        self._handles = itertools.count()
        self._due: list[tuple[float, int, Session]] = []
        self._open: dict[int, _Open] = {}
        self._under_way: deque[tuple[StepPlan, Callable[[], tuple[StepOutput, float]]]] = deque()
        self.answers: list[Answer] = []

    def run(self, sessions: Iterable[Session], until_s: float) -> list[Answer]:
        """Answers of all turns asked before ``until_s``, in order of their coming; the last may be unfinished. Another
        call goes on from there."""
        for session in sessions:
            self._expect(session, session.begins_at)
        while self._clock() < until_s and (self._due or self._open):
            while self._due and self._due[0][0] <= self._clock():
                self.ask(heapq.heappop(self._due)[2])
            if not self._turn() and (self._due or self._open):
                # Nothing to compute: until the next request, or for what holds the open ones back.
                soon = self._clock() + _PATIENCE_S if self._open else until_s
                self._clock.wait_until(min(soon, until_s, self._due[0][0] if self._due else until_s))
        while self._under_way:
            self._finish()
        return self.answers

    def until(self, done: Callable[[], bool]) -> None:
        """Goes on with what was asked until ``done``; later turns do not come. A step may still be under way then."""
        while not done():
            self._turn()

    def _turn(self) -> bool:
        plan = self._scheduler.schedule()
        if plan is not None:
            self._under_way.append((plan, self._executor.begin(plan)))
        answered = self._take_outcome()
        if len(self._under_way) > (self._executor.ahead if plan is not None else 0):
            self._finish()
        return plan is not None or bool(self._under_way) or answered

    def _finish(self) -> None:
        plan, ended = self._under_way.popleft()
        output, seconds = ended()
        self._scheduler.commit(plan, output)
        self._scheduler.took(plan, seconds)
        self._take_outcome()

    def _take_outcome(self) -> bool:
        """Whether the arena was asked for something."""
        now, outcome = self._clock(), self._scheduler.take_outcome()
        if self._arena is not None:
            self._arena.answer(self._scheduler, outcome.kv)
        for first in outcome.first_tokens:
            answer = self._open[first.handle].answer
            answer.cached_tokens = answer.cached_tokens or first.cached.device + first.cached.memory
        for chunk in outcome.tokens:
            one = self._open[chunk.handle]
            one.tokens.extend(chunk.tokens)
            one.answer.times += [now] * len(chunk.tokens)
        for end in outcome.ends:
            one = self._open.pop(end.handle)
            one.answer.done = not end.error
            turn = one.session.turn
            assert turn is not None
            one.session.answered(one.tokens)
            self._expect(one.session, now + turn.pause_s)
            self._forget()
        return bool(outcome.kv)

    def _expect(self, session: Session, when: float) -> None:
        if session.turn is not None:
            heapq.heappush(self._due, (when, session.number, session))

    def go_on_with(self, executor: Executor) -> None:
        """Another carries out what comes. It knows nothing of what is open, which is asked again with the tokens that
        have come, as after the loss of an engine."""
        opened = list(self._open.values())
        self.abort()
        self._executor = executor
        for one in opened:
            request = replace(one.request, handle=next(self._handles), generated=one.tokens[:])
            self._open[request.handle] = replace(one, request=request)
            self._executor.expect(request)
            self._scheduler.add(request)

    def abort(self) -> None:
        """Ends what is open, and what is under way."""
        while self._under_way:
            self._finish()
        for handle in list(self._open):
            self._scheduler.abort(handle)
        self._open.clear()
        self._scheduler.take_outcome()

    def ask(self, session: Session) -> Answer:
        """The session's next turn, now."""
        turn = session.turn
        assert turn is not None
        prompt, handle, now = session.prompt(), next(self._handles), self._clock()
        answer = Answer(now, len(prompt), turn.output_tokens)
        self.answers.append(answer)
        sampling = Sampling(max_tokens=turn.output_tokens, ignore_eos=True)
        request = Request(handle, prompt, _KEY, sampling, received_at=now, sparse_prefill=self._sparse)
        self._open[handle] = _Open(session, request, answer)
        self._executor.expect(request)
        self._scheduler.add(request)
        return answer
