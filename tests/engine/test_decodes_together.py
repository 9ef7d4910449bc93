"""Ranks decode over tensors that never move: those that share experts in room that they agree on, those that share the
vocabulary sample where the logits are; one rank's tokens all the same."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
from katydid_engine import decode_steps
from katydid_engine.collectives import SingleRank
from katydid_engine.decode_buffers import Bucket
from katydid_engine.decode_steps import Uncaptured
from katydid_engine.loader import load_model
from katydid_engine.lockstep import Lockstep
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.parallel import ParallelPlan
from katydid_engine.plan import Run, SampleRow, Start, StepPlan
from katydid_engine.request import Sampling
from katydid_engine.runner import Runner
from katydid_engine.step_outcome import Launched

from tests.engine.thread_group import ThreadGroup, on_ranks
from tests.tiny_model import write_tiny_model

STEPS = 6


class Requests:
    """Some sequences of one rank, prompts first and then greedy tokens."""

    def __init__(self, model: DecoderLM, numbers: list[int], drafts: int = 0, *, ahead: bool = False) -> None:
        self.runner = Runner(model, 24, collectives=SingleRank(), drafts=drafts > 0, ahead=ahead)
        self._drafts, self._ahead = drafts, ahead
        self._under_way: Launched | None = None
        self._numbers = numbers
        self._length = {number: 5 + 9 * number for number in numbers}
        self.tokens: dict[int, list[int]] = {number: [] for number in numbers}

    def prompt(self) -> None:
        starts, runs = [], []
        for row, number in enumerate(self._numbers):
            ids = array("I", [(7 * place + number) % 250 for place in range(self._length[number])])
            starts.append(Start(number, Sampling(ignore_eos=True), len(ids), ids))
            runs.append(Run(number, 0, ids, 0, array("I", range(3 * row, 3 * row + 3))))
        self._width = 1 + self._drafts
        self._take(StepPlan(0, starts=tuple(starts), runs=tuple(runs), samples=self._samples, drafts=self._drafts))

    def step(self) -> None:
        if self._ahead:  # the newest token is still coming
            runs = tuple(
                Run(number, self._length[number], array("I", (0,)), 3, array("I"), ahead=True)
                for number in self._numbers
            )
        else:
            runs = tuple(
                Run(number, self._length[number] - 1, array("I", [self.tokens[number][-1]]), 3, array("I"))
                for number in self._numbers
            )
        self._take(
            StepPlan(
                1,
                runs=runs,
                num_decodes=len(runs),
                decode_q_len=self._width,
                samples=self._samples,
                drafts=self._drafts,
            )
        )

    @property
    def _samples(self) -> tuple[SampleRow, ...]:
        return tuple(SampleRow(row, 0) for row in range(len(self._numbers)))

    def finish(self) -> None:
        if self._under_way is not None:
            self._commit(self._under_way)

    def _take(self, plan: StepPlan) -> None:
        launched = self.runner.launch(plan)
        if self._ahead:
            self.finish()
            self._under_way = launched
        else:
            self._commit(launched)

    def _commit(self, launched: Launched) -> None:
        for number, tokens in zip(self._numbers, launched.output().tokens, strict=True):
            self.tokens[number] += tokens
            self._length[number] += len(tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "hy_v3")


@pytest.mark.parametrize(("ahead", "parts"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_ranks_with_more_and_fewer_rows_and_none(folder: Path, ahead: bool, parts: int) -> None:
    """In two parts each takes half the room on its way."""
    of_rank = [[0, 1, 2, 3, 4], [5], [], [6, 7]]
    alone = Requests(load_model(folder), [number for numbers in of_rank for number in numbers])
    alone.prompt()
    for _ in range(STEPS):
        alone.step()

    def work(group: ThreadGroup) -> tuple[dict[int, list[int]], int]:
        model = load_model(folder, plan=ParallelPlan.parse("dp4,ep4"), experts=group, micro_batches=parts)
        graphs = 0
        requests = Requests(model, of_rank[group.rank], ahead=ahead)
        steps = requests.runner.use_decode_steps(Uncaptured(), rows=8, tokens=128)
        steps.prepare()
        assert {block.exchange.capacity for block in model.dispatched} == {None}
        lockstep = Lockstep(group, model.take_part)
        model.before_pass = lockstep.enter
        forward = steps.forward

        def counted(bucket):  # type: ignore[no-untyped-def]
            nonlocal graphs
            graphs += 1
            assert {block.exchange.capacity for block in model.dispatched} == {8 // parts}
            return forward(bucket)

        steps.forward = counted  # type: ignore[method-assign]
        for turn in range(1 + STEPS):
            if not of_rank[group.rank]:
                lockstep.idle()
            elif turn:
                requests.step()
            else:
                requests.prompt()
        requests.finish()
        return requests.tokens, graphs

    found = on_ranks(4, work)
    assert {number: tokens for own, _ in found for number, tokens in own.items()} == alone.tokens
    assert [graphs for _, graphs in found] == [STEPS, STEPS, 0, STEPS]


class Passes:
    """Counts them, until no rank has anything left to compute."""

    def __init__(self) -> None:
        self.left = 1
        self.over = False
        self.count = 0

    def progress(self) -> int:
        return self.left

    def agreed(self, progress: list[int], *, passing: bool) -> None:
        self.over = not any(progress)
        self.count += passing

    def meanwhile(self) -> None:
        pass


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("drafts", [[2, 0, 2, 2], [1, 0, 2, 1]], ids=["as many", "not as many"])
def test_ranks_draft_together(tmp_path: Path, drafts: list[int], parts: int) -> None:
    """Three with requests and one without: what each says alone, and no round for drafts where all have as many."""
    folder = write_tiny_model(tmp_path / "mtp", "hy_v3", num_nextn_predict_layers=1)
    of_rank = [[0, 1, 2], [], [3], [4]]

    def requests_of(model: DecoderLM, rank: int) -> Requests:
        requests = Requests(model, of_rank[rank], drafts[rank])
        requests.runner.use_decode_steps(Uncaptured(), rows=4, tokens=128, depths=(drafts[rank],)).prepare()
        return requests

    def say(requests: Requests) -> dict[int, list[int]]:
        requests.prompt()
        for _ in range(STEPS):
            requests.step()
        return requests.tokens

    def work(group: ThreadGroup) -> tuple[dict[int, list[int]], int]:
        model = load_model(folder, plan=ParallelPlan.parse("dp4,ep4"), experts=group, micro_batches=parts)
        passes = Passes()
        requests = requests_of(model, group.rank)
        lockstep = Lockstep(group, model.take_part, passes)
        model.before_pass = lockstep.enter
        if of_rank[group.rank]:
            say(requests)
        passes.left = 0
        while not passes.over:
            lockstep.idle()
        return requests.tokens, passes.count

    alone = [say(requests_of(load_model(folder), rank)) if of_rank[rank] else {} for rank in range(4)]
    found = on_ranks(4, work)
    assert [tokens for tokens, _ in found] == alone
    counts = {count for _, count in found}
    # The passes of a prompt are agreed on one by one.
    assert len(counts) == 1
    assert (counts.pop() == 3 + STEPS) == (drafts[0] == drafts[2])


class Replayed(Uncaptured):
    """As a graph: what is done again is not the model's ``forward``, which hears nothing of it."""

    def run(self, key: tuple[str, Bucket]) -> None:
        if key[0] != "forward":
            super().run(key)


def test_the_pass_behind_a_replayed_graph_is_agreed_on(folder: Path) -> None:
    model = load_model(folder)
    requests = Requests(model, [0, 1])
    steps = requests.runner.use_decode_steps(Replayed(), rows=2, tokens=128)
    steps.prepare()
    for work in steps._pieces._works.values():  # type: ignore[attr-defined]
        work()
    asked: list[tuple[int, int]] = []

    def agree(kind: int, rows: int, behind: int) -> tuple[int, int]:
        asked.append((kind, rows))
        return rows, behind

    model.before_pass = agree
    requests.prompt()
    requests.step()
    requests.step()
    more = Requests(model, [2])
    more.prompt()
    assert asked == [(0, 5 + 14), (0, 2), (0, 2), (0, 23)]


HOW = (
    [Sampling(seed=row, temperature=row / 4, ignore_eos=True) for row in range(5)],
    [Sampling(seed=row, temperature=1.0, top_k=7 * row, top_p=1 - row / 9, ignore_eos=True) for row in range(5)],
    [Sampling(seed=row, temperature=1.0, frequency_penalty=row / 4, ignore_eos=True) for row in range(3)],
)


@pytest.mark.parametrize("drafts", [0, 2])
def test_ranks_that_share_the_vocabulary_sample_one_ranks_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: int
) -> None:
    folder = write_tiny_model(tmp_path / "mtp", "hy_v3", num_nextn_predict_layers=1)
    ways: list[bool] = []
    parted = decode_steps.sample_parts

    def counted(*arguments, filters, **options):  # type: ignore[no-untyped-def]
        ways.append(filters)
        return parted(*arguments, filters=filters, **options)

    monkeypatch.setattr(decode_steps, "sample_parts", counted)

    def say(group: SingleRank | ThreadGroup) -> list[list[int]]:
        plan = ParallelPlan(tp=group.size)
        model = load_model(folder, plan=plan, collectives=group)
        runner = Runner(model, 24, collectives=group, drafts=drafts > 0, ahead=True)
        steps = runner.use_decode_steps(Uncaptured(), rows=8, tokens=128, depths=(drafts,))
        steps.prepare([Bucket(8, 1 + drafts, drafts)])
        steps._rows = [8]
        said = []
        for how in HOW:
            samples = tuple(SampleRow(row, 0) for row in range(len(how)))
            prompts = [array("I", [(7 * place + row) % 250 for place in range(5 + 9 * row)]) for row in range(len(how))]
            starts = tuple(
                Start(row, one, len(ids), ids) for row, (one, ids) in enumerate(zip(how, prompts, strict=True))
            )
            runs = tuple(
                Run(row, 0, ids, 0, array("I", range(3 * row, 3 * row + 3))) for row, ids in enumerate(prompts)
            )
            lengths = [len(ids) for ids in prompts]
            launched = runner.launch(StepPlan(0, starts=starts, runs=runs, samples=samples, drafts=drafts))
            for _ in range(5):
                # Every rank goes on from what lies on its own device; the first alone tells the tokens.
                told = launched.output().tokens or said[-1:]
                runs = tuple(
                    Run(row, length, array("I", (0,)), 3, array("I"), ahead=True) for row, length in enumerate(lengths)
                )
                plan_ = StepPlan(
                    1, runs=runs, num_decodes=len(runs), decode_q_len=1 + drafts, samples=samples, drafts=drafts
                )
                if group.rank == 0:
                    said.append([list(tokens) for tokens in told])
                lengths = [length + 1 for length in lengths]
                launched = runner.launch(plan_)
            if group.rank == 0:
                said.append([list(tokens) for tokens in launched.output().tokens])
            runner.run(StepPlan(2, ends=tuple(range(len(how)))))
        return said

    alone = say(SingleRank())
    assert ways == []
    assert on_ranks(2, say)[0] == alone
    assert ways.count(False) == ways.count(True) > 0
