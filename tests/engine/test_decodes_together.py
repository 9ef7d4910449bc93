"""Ranks that share experts decode over tensors that never move, in room that they agree on: one rank's tokens."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
from katydid_engine.collectives import SingleRank
from katydid_engine.decode_steps import Uncaptured
from katydid_engine.loader import load_model
from katydid_engine.lockstep import Lockstep
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.parallel import ParallelPlan
from katydid_engine.plan import Run, SampleRow, Start, StepPlan
from katydid_engine.request import Sampling
from katydid_engine.runner import Runner

from tests.engine.thread_group import ThreadGroup, on_ranks
from tests.tiny_model import write_tiny_model

STEPS = 6


class Requests:
    """Some sequences of one rank, prompts first and then greedy tokens."""

    def __init__(self, model: DecoderLM, numbers: list[int]) -> None:
        self.runner = Runner(model, 24, collectives=SingleRank())
        self._numbers = numbers
        self._length = {number: 5 + 9 * number for number in numbers}
        self.tokens: dict[int, list[int]] = {number: [] for number in numbers}

    def prompt(self) -> None:
        starts, runs = [], []
        for row, number in enumerate(self._numbers):
            ids = array("I", [(7 * place + number) % 250 for place in range(self._length[number])])
            starts.append(Start(number, Sampling(ignore_eos=True), len(ids), ids))
            runs.append(Run(number, 0, ids, 0, array("I", range(3 * row, 3 * row + 3))))
        self._take(StepPlan(0, starts=tuple(starts), runs=tuple(runs), samples=self._samples))

    def step(self) -> None:
        runs = tuple(
            Run(number, self._length[number] - 1, array("I", [self.tokens[number][-1]]), 3, array("I"))
            for number in self._numbers
        )
        self._take(StepPlan(1, runs=runs, num_decodes=len(runs), samples=self._samples))

    @property
    def _samples(self) -> tuple[SampleRow, ...]:
        return tuple(SampleRow(row, 0) for row in range(len(self._numbers)))

    def _take(self, plan: StepPlan) -> None:
        for number, tokens in zip(self._numbers, self.runner.run(plan).tokens, strict=True):
            self.tokens[number] += tokens
            self._length[number] += len(tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "hy_v3")


def test_ranks_with_more_and_fewer_rows_and_none(folder: Path) -> None:
    of_rank = [[0, 1, 2, 3, 4], [5], [], [6, 7]]
    alone = Requests(load_model(folder), [number for numbers in of_rank for number in numbers])
    alone.prompt()
    for _ in range(STEPS):
        alone.step()

    def work(group: ThreadGroup) -> tuple[dict[int, list[int]], int]:
        model = load_model(folder, plan=ParallelPlan.parse("dp4,ep4"), experts=group)
        graphs = 0
        requests = Requests(model, of_rank[group.rank])
        steps = requests.runner.use_decode_steps(Uncaptured(), rows=8, tokens=128)
        steps.prepare()
        assert {block.exchange.capacity for block in model.dispatched} == {None}
        lockstep = Lockstep(group, model.take_part)
        model.before_pass = lockstep.enter
        forward = steps.forward

        def counted(bucket):  # type: ignore[no-untyped-def]
            nonlocal graphs
            graphs += 1
            return forward(bucket)

        steps.forward = counted  # type: ignore[method-assign]
        for turn in range(1 + STEPS):
            if not of_rank[group.rank]:
                lockstep.idle()
            elif turn:
                requests.step()
            else:
                requests.prompt()
        return requests.tokens, graphs

    found = on_ranks(4, work)
    assert {number: tokens for own, _ in found for number, tokens in own.items()} == alone.tokens
    assert [graphs for _, graphs in found] == [STEPS, STEPS, 0, STEPS]
