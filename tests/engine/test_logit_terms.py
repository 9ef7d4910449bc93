"""What rows ask beyond temperature, filters and a seed, over tensors that never move: as op by op, whatever an earlier
step left there."""

from __future__ import annotations

import math
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_engine.collectives import SingleRank
from katydid_engine.decode_steps import Uncaptured
from katydid_engine.loader import load_model
from katydid_engine.logit_terms import MOST_TOP, LogitTerms
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.plan import Run, SampleRow, Start, StepOutput, StepPlan
from katydid_engine.request import Sampling
from katydid_engine.runner import Runner
from katydid_engine.sampler import Row, SamplingRows, sample_rows
from katydid_engine.seen_tokens import SeenTokens
from katydid_engine.sequence_sampler import Limits, SequenceSampler
from katydid_engine.step_choice import StepChoice
from katydid_kernels.sample import SamplingBatch, sample
from torch import Tensor

from tests.tiny_model import write_tiny_model

CPU, VOCAB = torch.device("cpu"), 70
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.7]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-3, 3, width=16), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    seed=st.integers(0, 9),
)
masks = st.none() | st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3)


def sampler(number: int, sampling: Sampling) -> SequenceSampler:
    return SequenceSampler(Start(number, sampling, 3, array("I", [number % 5, 7, 7, 8])), ())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.tuples(samplings, masks, masks), min_size=1, max_size=4), min_size=2, max_size=3))
def test_as_op_by_op(steps: list[list[tuple[Sampling, list[int] | None, list[int] | None]]]) -> None:
    generator = torch.Generator().manual_seed(1)
    ours, theirs = SeenTokens(VOCAB, CPU), SeenTokens(VOCAB, CPU)
    terms = LogitTerms(4, 2, VOCAB, ours, CPU)
    table, number = ours.table, 0
    for step in steps:
        samplers = [sampler(number + row, sampling) for row, (sampling, *_) in enumerate(step)]
        number += len(step)
        limits: list[list[Limits]] = [
            [(dict(sampling.logit_bias), None if mask is None else torch.tensor([mask]).int()) for mask in of]
            for sampling, *of in step
        ]
        for one in samplers:
            ours.begin(one)
        assert terms.fit(samplers, 2)
        terms.fill(samplers, limits)
        logits = torch.randn(2 * len(step), VOCAB, generator=generator)
        positions = torch.arange(2 * len(step), dtype=torch.int32)
        pending = torch.randint(-1, VOCAB, (2 * len(step), 1), generator=generator, dtype=torch.int32)
        rows = [Row(one, 0, bias, mask) for one, of in zip(samplers, limits, strict=True) for bias, mask in of]
        wanted = sample_rows(logits, rows, positions, theirs, pending)
        found = sample(logits, terms.batch(plain_batch(samplers, positions), pending))
        assert torch.equal(found, wanted)
        for one in samplers:
            ours.end(one.id)
            theirs.end(one.id)
    assert ours.table is table, "a graph knows where it is"


def plain_batch(samplers: list[SequenceSampler], positions: Tensor) -> SamplingBatch:
    columns = SamplingRows(samplers, [0] * len(samplers)).columns(2)
    found = {name: torch.from_numpy(column) for name, column in columns.items()}
    return SamplingBatch(
        temperature=found["temperature"].view(torch.float32),
        top_k=found["top_k"],
        top_p=found["top_p"].view(torch.float32),
        min_p=found["min_p"].view(torch.float32),
        seeds=found["seeds"].view(torch.int64),
        positions=positions,
    )


def test_what_has_no_room() -> None:
    seen = SeenTokens(VOCAB, CPU)
    terms = LogitTerms(1, 2, VOCAB, seen, CPU)
    asks = {
        "many biases": Sampling(logit_bias=tuple((token, 1.0) for token in range(600))),
        "many log probabilities": Sampling(logprobs=MOST_TOP + 1),
    }
    for why, sampling in asks.items():
        assert not terms.fit([sampler(1, sampling)], 2), why
    assert terms.fit([sampler(1, Sampling(logprobs=MOST_TOP, min_tokens=4, stop_token_ids=(1,)))], 2)
    first, second = (sampler(number, Sampling(presence_penalty=0.5)) for number in (1, 2))
    seen.begin(first)
    assert terms.fit([first], 2)
    seen.begin(second)
    assert not terms.fit([first], 2), "the table of counts may have moved"
    assert terms.fit([sampler(3, Sampling(logit_bias=((4, -math.inf),)))], 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderLM:
    torch.set_num_threads(1)
    return load_model(write_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama"))


def decoded(model: DecoderLM, *, prepared: bool) -> list[StepOutput]:
    """Three steps of two rows."""
    runner = Runner(model, 4, collectives=SingleRank(), ahead=True)
    if prepared:
        runner.use_decode_steps(Uncaptured(), rows=2, tokens=100).prepare()
    asks = (Sampling(logprobs=3, frequency_penalty=1.0), Sampling(temperature=1.0, logprobs=0, logit_bias=((5, 2.0),)))
    starts = tuple(Start(number, ask, 2, array("I", [3, 4])) for number, ask in enumerate(asks))
    rows, outputs, tokens = (SampleRow(0, 0), SampleRow(1, 0)), [], [array("I", [3, 4]), array("I", [3, 4])]
    for step in range(3):
        at = 0 if step == 0 else 1 + step
        runs = tuple(Run(row, at, tokens[row], 0, array("I", [row])) for row in range(2))
        outputs.append(
            runner.run(
                StepPlan(step, starts=starts if step == 0 else (), runs=runs, num_decodes=2 * (step > 0), samples=rows)
            )
        )
        tokens = list(outputs[-1].tokens)
    return outputs


def test_every_row_chooses_in_the_prepared_step(model: DecoderLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, choose, plans = decoded(model, prepared=False), StepChoice.choose, []

    def noted(self, plan, *rest):  # type: ignore[no-untyped-def]
        plans.append(plan)
        return choose(self, plan, *rest)

    monkeypatch.setattr(StepChoice, "choose", noted)
    found = decoded(model, prepared=True)
    assert [plan.num_decodes for plan in plans] == [0], "the prompts' alone"
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert [ours.logprobs[row].top_tokens for row in (0, 1)] == [theirs.logprobs[row].top_tokens for row in (0, 1)]
        for row in (0, 1):
            assert ours.logprobs[row].chosen == pytest.approx(theirs.logprobs[row].chosen)
            assert ours.logprobs[row].top_logprobs == pytest.approx(theirs.logprobs[row].top_logprobs)
    assert [ours.logprobs[0].top for ours in found] == [3, 3, 3]
