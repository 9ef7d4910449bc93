"""The loop with a thread for steps: it plans the next while one runs, and what fails there ends it."""

from __future__ import annotations

import socket
import threading
from array import array
from collections.abc import Callable, Iterator

import pytest
from katydid_engine.block_pool import BlockPool
from katydid_engine.channel import BlockingChannel
from katydid_engine.messages import Profile, Reply, StepReport, Stop, Submit
from katydid_engine.plan import StepOutput, StepPlan
from katydid_engine.request import Request, Sampling
from katydid_engine.scheduler import Scheduler, SchedulerConfig
from katydid_engine.step_loop import StepLoop
from katydid_engine.step_thread import OwnThread
from katydid_runtime.block_hash import ChainKey

from tests.engine.paper_runner import PaperRunner, expected_output


class NoProfiler:
    """Two steps make a profile."""

    left = 0

    def start(self, steps: int, path: str) -> None:
        if path == "taken":
            raise RuntimeError("a profile is being recorded")
        self.left = steps

    def step_done(self) -> bool:
        self.left -= 1
        return self.left == 0


class Ends:
    """A loop on a thread of the test, and the face's end of its channel."""

    def __init__(self, run: Callable[[StepPlan], StepOutput], ahead: bool) -> None:
        theirs, ours = socket.socketpair()
        self.face = BlockingChannel(ours.detach())
        self.planned: list[int] = []
        config = SchedulerConfig(max_model_tokens=300, max_batch_tokens=96, max_sequences=4)
        pool = BlockPool(12)
        self.channel = BlockingChannel(theirs.detach())
        self.loop = StepLoop(
            self.channel,
            Scheduler(config, pool, lambda: 0.0),
            pool,
            run=run,
            publish=lambda plan: self.planned.append(plan.number),
            prepare=lambda _: None,
            profiler=NoProfiler(),
            thread=OwnThread(lambda: None) if ahead else None,
        )
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._turn)
        self.thread.start()

    def _turn(self) -> None:
        try:
            self.loop.run()
        except RuntimeError as error:
            self.failure = error

    def hear(self) -> Iterator[object]:
        while self.thread.is_alive():
            yield from self.face.receive(0.2)

    def stop(self) -> None:
        if self.failure is None:
            self.face.send(Stop())
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.face.close()
        self.channel.close()


def request(max_tokens: int) -> Request:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, seed=2)
    return Request(1, array("I", range(40)), ChainKey(b"m" * 32), sampling)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_next_step_is_planned_while_one_runs(ahead: bool) -> None:
    runner, overlapped = PaperRunner(12), threading.Event()
    ends: Ends

    def run(plan: StepPlan) -> StepOutput:
        if ahead and 2 <= plan.number <= 30:
            # It must be planned before this step ends; with steps in turns it never would.
            while plan.number + 1 not in ends.planned:
                threading.Event().wait(0.001)
            overlapped.set()
        elif not ahead and plan.number + 1 in ends.planned:
            overlapped.set()
        return runner.run(plan)

    ends = Ends(run, ahead)
    wanted = request(40)
    ends.face.send(Submit(wanted))
    ends.face.send(Profile(7, 2, "somewhere"))
    ends.face.send(Profile(8, 2, "taken"))
    tokens: list[int] = []
    replies: list[Reply] = []
    for message in ends.hear():
        if isinstance(message, Reply):
            replies.append(message)
        elif isinstance(message, StepReport):
            tokens += [token for row in message.tokens for token in row.tokens]
            if message.ends:
                break
    ends.stop()
    assert tokens == expected_output(wanted, 0, frozenset(), 300)[0]
    assert overlapped.is_set() == ahead
    assert {(reply.call, reply.failed) for reply in replies} == {(7, False), (8, True)}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_fails_ends_the_loop(ahead: bool) -> None:
    def run(plan: StepPlan) -> StepOutput:
        raise RuntimeError("no such kernel")

    ends = Ends(run, ahead)
    ends.face.send(Submit(request(3)))
    ends.thread.join(30)
    ends.stop()
    assert str(ends.failure) == "no such kernel"
