"""Decodes with a prompt's chunk beside them, over tensors that never move: tokens are those of the pass op by op."""

from __future__ import annotations

from array import array

import pytest
import torch
from katydid_engine.chunk_steps import ChunkSteps
from katydid_engine.collectives import SingleRank
from katydid_engine.decode_steps import Uncaptured
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.plan import Run, SampleRow, Start, StepPlan
from katydid_engine.request import Sampling
from katydid_engine.runner import Runner

from tests.tiny_model import write_tiny_model

CHUNK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderLM:
    torch.set_num_threads(1)
    return load_model(write_tiny_model(tmp_path_factory.mktemp("models") / "mtp", "hy_v3", num_nextn_predict_layers=1))


class Counting(Uncaptured):
    passes = 0

    def run(self, key):  # type: ignore[no-untyped-def]
        self.passes += key[0].startswith("chunk")
        super().run(key)


def generated(model: DecoderLM, decodes: int, drafts: int, *, prepared: bool) -> tuple[list[list[int]], int]:
    """Tokens of sequences that decode while a prompt of two and a half chunks comes, and of that prompt."""
    runner = Runner(model, 24, collectives=SingleRank(), drafts=drafts > 0)
    pieces = Counting()
    if prepared:
        runner.use_chunk_steps(pieces, rows=12, tokens=200, depths=(0, drafts), chunks=(CHUNK, 32)).prepare()
    prompts = [array("I", [(7 * place + row) % 250 for place in range(20 + row)]) for row in range(decodes + 1)]
    prompts[-1] = array("I", [place % 240 for place in range(2 * CHUNK + 8)])
    starts = [Start(row, Sampling(ignore_eos=True), len(prompt), prompt) for row, prompt in enumerate(prompts)]
    pages = [array("I", range(2 * row, 2 * row + 2)) for row in range(decodes + 1)]
    tokens: list[list[int]] = [[] for _ in prompts]
    plan = StepPlan(
        0,
        starts=tuple(starts[:-1]),
        runs=tuple(Run(row, 0, prompts[row], 0, pages[row]) for row in range(decodes)),
        samples=tuple(SampleRow(row, 0) for row in range(decodes)),
        drafts=drafts,
    )
    for row, own in enumerate(runner.run(plan).tokens):
        tokens[row] += own
    for first in range(0, len(prompts[-1]), CHUNK):
        chunk = prompts[-1][first : first + CHUNK]
        last = first + CHUNK >= len(prompts[-1])
        runs = [
            Run(row, len(prompts[row]) + len(tokens[row]) - 1, array("I", tokens[row][-1:]), 2, array("I"))
            for row in range(decodes)
        ]
        more = () if last else prompts[-1][first + CHUNK : first + CHUNK + 1]
        runs.append(Run(decodes, first, chunk, 0, pages[-1], next_token=more[0] if more else -1))
        plan = StepPlan(
            1,
            starts=() if first else (starts[-1],),
            runs=tuple(runs),
            num_decodes=decodes,
            decode_q_len=1 + drafts,
            samples=tuple(SampleRow(row, 0) for row in range(decodes + last)),
            drafts=drafts,
        )
        for row, own in enumerate(runner.run(plan).tokens):
            tokens[row] += own
    return tokens, pieces.passes


@pytest.mark.parametrize(("decodes", "drafts"), [(3, 0), (8, 0), (9, 1)])
def test_the_same_tokens_as_op_by_op(model: DecoderLM, decodes: int, drafts: int) -> None:
    expected, none = generated(model, decodes, drafts, prepared=False)
    found, passes = generated(model, decodes, drafts, prepared=True)
    assert found == expected
    # The last chunk is of another size: it is the end of a whole one.
    assert (none, passes) == (0, 3)


def test_a_chunk_without_as_much_before_it_runs_op_by_op(model: DecoderLM) -> None:
    steps = ChunkSteps(model, model.new_kv_cache(1), Uncaptured(), rows=8, pages=3, chunks=(16, 32))
    run = TokenRun([5], 0, [0])
    for new, start, expected in ((16, 0, 16), (10, 6, 16), (10, 5, None), (17, 15, 32), (17, 14, None), (33, 90, None)):
        prompt = TokenRun([7] * new, start, [1, 2])
        found = steps.bucket(ForwardBatch.pack([run, prompt], num_decodes=1), start)
        assert (None if found is None else found[1]) == expected


def test_the_largest_bucket_comes_first(model: DecoderLM) -> None:
    steps = ChunkSteps(model, model.new_kv_cache(1), Uncaptured(), rows=20, pages=3, depths=(0, 2), chunks=(64, 256))
    sizes = [bucket.tokens + chunk for bucket, chunk in steps.buckets]
    assert sizes[0] == max(sizes) == 32 * 3 + 256
    assert len(set(steps.buckets)) == 3 * 2 * 2
