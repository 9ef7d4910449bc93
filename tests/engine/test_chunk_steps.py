"""Decodes with a prompt's chunk beside them, over tensors that never move: tokens are those of the pass op by op."""

from __future__ import annotations

import itertools
from array import array
from pathlib import Path

import pytest
import torch
from katydid_engine.chunk_steps import ChunkSteps
from katydid_engine.collectives import SingleRank
from katydid_engine.decode_steps import Captured, Pieces, Uncaptured
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.parallel import ParallelPlan
from katydid_engine.plan import Run, SampleRow, Start, StepPlan
from katydid_engine.request import Sampling
from katydid_engine.runner import Runner
from katydid_engine.sparse_prefill import SparsePrefill
from torch import Tensor

from tests.engine.thread_group import ThreadGroup, on_ranks
from tests.tiny_model import write_tiny_model

CHUNK = 16
TINY = Path(__file__).parents[2] / "models" / "hy3-tiny"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderLM:
    torch.set_num_threads(1)
    return load_model(write_tiny_model(tmp_path_factory.mktemp("models") / "mtp", "hy_v3", num_nextn_predict_layers=1))


class Counting(Uncaptured):
    passes = 0

    def run(self, key):  # type: ignore[no-untyped-def]
        self.passes += key[0].startswith("chunk")
        super().run(key)


def generated(
    model: DecoderLM, decodes: int, drafts: int, *, prepared: bool, depths: tuple[int, ...] = ()
) -> tuple[list[list[int]], int]:
    """Tokens of sequences that decode while a prompt of eight and a half chunks comes, and of that prompt."""
    runner = Runner(model, 24, collectives=SingleRank(), drafts=drafts > 0)
    pieces = Counting()
    if prepared:
        runner.use_chunk_steps(pieces, rows=12, tokens=200, depths=depths, chunks=(CHUNK, 32)).prepare()
    prompts = [array("I", [(7 * place + row) % 250 for place in range(20 + row)]) for row in range(decodes + 1)]
    prompts[-1] = array("I", [place % 240 for place in range(8 * CHUNK + 8)])
    starts = [Start(row, Sampling(ignore_eos=True), len(prompt), prompt) for row, prompt in enumerate(prompts)]
    pages = [array("I", range(2 * row, 2 * row + 2 + (row == decodes))) for row in range(decodes + 1)]
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


@pytest.mark.parametrize(
    ("decodes", "drafts", "depths"),
    [(3, 0, (0,)), (8, 0, (0, 1)), (9, 1, (0, 1)), (3, 1, (0, 1, 2, 3)), (9, 2, (0, 1, 2, 3))],
)
def test_the_same_tokens_as_op_by_op(model: DecoderLM, decodes: int, drafts: int, depths: tuple[int, ...]) -> None:
    """Rows with fewer drafts than the pass has room for are not told from those that fill it."""
    expected, none = generated(model, decodes, drafts, prepared=False)
    found, passes = generated(model, decodes, drafts, prepared=True, depths=depths)
    assert found == expected
    # The last chunk is of another size: it is the beginning of a whole one.
    assert (none, passes) == (0, 9)


def sparse_pages(model: DecoderLM, pieces: Pieces | None = None, length: int = 2000) -> Tensor:
    """What the layers behind the first left of a sparse prompt that came in chunks beside two decodes, K and V."""
    used = length // 64 + 1
    runner = Runner(model, used + 2, collectives=SingleRank())
    if pieces is not None:
        runner.use_chunk_steps(pieces, rows=4, tokens=length + 200, chunks=(128, 256), sparse=True).prepare()
    prompt = array("I", [(37 * i + i // 50) % 250 for i in range(length)])
    starts = [Start(row, Sampling(ignore_eos=True), 1, prompt[:1]) for row in range(2)]
    starts.append(Start(2, Sampling(ignore_eos=True), len(prompt), prompt, sparse_prefill=True))
    pages = [array("I", [used]), array("I", [used + 1]), array("I", range(used))]
    # A chunk may begin within a block, where what is cached ends, or be shorter than any that is prepared.
    borders = [0, 64, 320, 448, 576, *range(704, length - 256, 256), length - 80, length]
    for at, (first, last) in enumerate(itertools.pairwise(borders)):
        decodes = [Run(row, at, prompt[row : row + 1], 0, pages[row]) for row in range(2)]
        plan = StepPlan(
            1,
            starts=tuple(starts) if at == 0 else (),
            runs=(*decodes, Run(2, first, prompt[first:last], 0, pages[2])),
            num_decodes=2,
            samples=(SampleRow(0, 0), SampleRow(1, 0)),
        )
        runner.run(plan)
    cache = runner.kv_cache
    left = [part for layer in range(1, cache.num_layers) for part in (cache.layer(layer)[0], cache.layer(layer)[1])]
    return torch.stack([part[: used - 1].flatten().float().cpu() for part in left])


def test_sparse_chunks_leave_what_they_do_op_by_op(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = write_tiny_model(tmp_path / "three", "hy_v3", num_hidden_layers=3)
    dense, expected, found = load_model(folder), load_model(folder), load_model(folder)
    for model in (expected, found):
        model.use_sparse_prefill(SparsePrefill(budget=0.4, dense_layers=1, min_tokens=1000, tail_blocks=1))
    pieces = Counting()
    op_by_op, prepared = sparse_pages(expected), sparse_pages(found, pieces)
    assert pieces.passes == 10, "all but the first, which fills no block"
    torch.testing.assert_close(prepared, op_by_op, atol=1e-5, rtol=0)
    assert float((op_by_op - sparse_pages(dense)).abs().max()) > 1e-3, "it matters what is selected"


@pytest.mark.gpu
@pytest.mark.parametrize("pages", ["auto", "fp8"])
def test_sparse_chunks_as_graphs(pages: str) -> None:
    """What dense pages differ by from those where every block is kept is rounding, which turns a choice of experts now
    and then. Graphs differ by as much; that they select the same is another test's (`test_fixed_prefill.py`)."""
    model = load_model(TINY, device="cuda", dtype=torch.bfloat16, kv_cache_dtype=pages)
    dense, rounding = sparse_pages(model, length=8000), 0.0
    for budget in (1.0, 0.2):
        model.use_sparse_prefill(SparsePrefill(budget=budget, dense_layers=1, min_tokens=1000, tail_blocks=1))
        expected, found = (sparse_pages(model, pieces, length=8000) for pieces in (None, Captured()))
        graphs, matters = (float((other - expected).norm() / expected.norm()) for other in (found, dense))
        rounding = rounding or matters
        print(f"pages of {pages}, budget {budget}: graphs differ by {graphs:.4f}, dense ones by {matters:.4f}")
        assert graphs < 2 * rounding < 0.1


@pytest.mark.parametrize(
    ("pieces", "alone"),
    [
        *[(pieces, ()) for pieces in ((140, 33), (130, 11, 29), (16, 120, 24), (128, 5, 3, 32), (120, 5, 20))],
        ((64, 64, 45), (64,)),
    ],
)
def test_a_prompt_alone_is_computed_by_the_same_passes(
    model: DecoderLM, pieces: tuple[int, ...], alone: tuple[int, ...]
) -> None:
    """Of any size, behind a block at least or exactly as many: what is over behind it changes and writes nothing."""

    def tokens(*, prepared: bool) -> tuple[list[int], int, Tensor]:
        runner, counting = Runner(model, 6, collectives=SingleRank()), Counting()
        if prepared:
            runner.use_chunk_steps(counting, rows=8, tokens=200, chunks=(CHUNK, 32), alone=alone).prepare()
        prompt, pages = array("I", [place * 3 % 250 for place in range(sum(pieces))]), array("I", (3, 1, 4))
        start = Start(0, Sampling(ignore_eos=True), len(prompt), prompt)
        first, found = 0, []
        for piece in pieces:
            run = Run(0, first, prompt[first : first + piece], 0, pages)
            first += piece
            samples = (SampleRow(0, 0),) if first == len(prompt) else ()
            found += runner.run(
                StepPlan(1, starts=(start,) if first == piece else (), runs=(run,), samples=samples)
            ).tokens
        cache = runner.kv_cache
        return found[0].tolist(), counting.passes, torch.stack([cache.layer(i)[0] for i in range(cache.num_layers)])

    expected, none, written = tokens(prepared=False)
    found, passes, same = tokens(prepared=True)
    assert found == expected
    torch.testing.assert_close(same, written, atol=1e-5, rtol=0)
    assert not same[:, [0, 2, 5]].any(), "pages of nobody"
    ends = itertools.accumulate(pieces)
    padded = [piece <= max((32, *alone)) and end >= 128 for piece, end in zip(pieces, ends, strict=True)]
    assert (none, passes) == (0, sum(padded) + (pieces[0] in (16, *alone)))


def test_a_chunk_in_two_parts_is_the_one_of_the_op_by_op_pass(tmp_path: Path) -> None:
    """On two ranks: two whole chunks and what is left, behind each other."""
    folder, prompt = write_tiny_model(tmp_path / "tiny", "hy_v3"), [place * 3 % 250 for place in range(150)]

    def work(group: ThreadGroup) -> list[tuple[Tensor, int]]:
        found = []
        for halved in ((), (64,)):
            plan = ParallelPlan.parse("tp2,sp,ep2")
            model = load_model(folder, plan=plan, collectives=group, micro_batches=2, halved_from=40)
            runner, counting = Runner(model, 3, collectives=group), Counting()
            steps = runner.use_chunk_steps(counting, rows=8, tokens=160, chunks=(16,), halved=halved)
            steps.prepare([bucket for bucket in steps.buckets if bucket[1] in halved])
            ids, pages = array("I", prompt), array("I", (2, 0, 1))
            start = Start(0, Sampling(ignore_eos=True), len(prompt), ids)
            for first in (0, 64, 128):
                run = Run(0, first, ids[first : first + 64], 0, pages)
                runner.run(StepPlan(1, starts=() if first else (start,), runs=(run,)))
            written = [part.flatten() for part in (*runner.kv_cache.k_pages, *runner.kv_cache.v_pages)]
            found.append((torch.cat(written), counting.passes))
        return found

    for (expected, none), (written, passes) in on_ranks(2, work):
        assert (none, passes) == (0, 2)
        torch.testing.assert_close(written, expected, atol=1e-5, rtol=0)


def test_which_chunks_are_graphs(model: DecoderLM) -> None:
    steps = ChunkSteps(model, model.new_kv_cache(1), Uncaptured(), rows=8, pages=3, chunks=(16, 32, 256))
    run = TokenRun([5], 0, [0])
    cases = ((16, 0, 16), (10, 117, None), (10, 118, 16), (17, 120, 32), (17, 0, None), (32, 60, 32), (33, 150, None))
    for new, start, expected in cases:
        prompt = TokenRun([7] * new, start, [1, 2, 0])
        for decodes in ([run], []):
            batch = ForwardBatch.pack([*decodes, prompt], num_decodes=len(decodes))
            found = steps.bucket(batch)
            assert (None if found is None else found[1]) == expected, "256 tokens are more than a sequence has"
    assert steps.bucket(ForwardBatch.pack([run, run], num_decodes=0)) is None, "two prompts"
    larger = ChunkSteps(model, model.new_kv_cache(1), Uncaptured(), rows=8, pages=3, chunks=(16,), alone=(64, 512))
    assert [(bucket.tokens, chunk) for bucket, chunk in larger.buckets] == [(0, 64), (8, 16)]
    for decodes in ([run], []):
        found = larger.bucket(
            ForwardBatch.pack([*decodes, TokenRun([7] * 33, 140, [1, 2, 0])], num_decodes=len(decodes))
        )
        assert (None if found is None else (found[0].rows, found[1])) == (None if decodes else (0, 64))
    assert steps.bucket(ForwardBatch.pack([run, run], num_decodes=2)) is None, "no prompt"


def test_the_largest_bucket_comes_first(model: DecoderLM) -> None:
    """Of drafts the fewest and the most: another number of them is padded."""
    cache = model.new_kv_cache(1)
    steps = ChunkSteps(model, cache, Uncaptured(), rows=20, pages=5, depths=(0, 1, 2), chunks=(64, 256))
    sizes = [bucket.tokens + chunk for bucket, chunk in steps.buckets]
    assert sizes[0] == max(sizes) == 24 * 3 + 256
    assert len(set(steps.buckets)) == 2 * 2 * 2
    prompt = TokenRun([7] * 64, 64, [1, 2, 0])
    for q_len, width in ((1, 1), (2, 3), (3, 3), (4, None)):
        rows = [TokenRun([5] * q_len, 0, [0])] * 9
        found = steps.bucket(ForwardBatch.pack([*rows, prompt], num_decodes=9, decode_q_len=q_len))
        assert (None if found is None else (found[0].rows, found[0].width)) == (None if width is None else (24, width))
