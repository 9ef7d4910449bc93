"""Stem's selection against the rule in plain Python, chunks against whole prompts, kernels against the reference."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_kernels.stem_select import StemRule, kept_blocks, sparse_plan, stem_select, stem_select_reference
from katydid_kernels.stem_select.op import launch_select
from torch import Tensor

from tests.kernels.paged import FP8, Pages, dense, make_pages, scales

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = StemRule(budget=0.4, sink=1, window=1)


def lists_of(lists: Tensor, plan: object) -> list[list[list[int]]]:
    counts = plan.in_order[:, 5].tolist()  # type: ignore[attr-defined]
    return [[row[:count] for row in tile] for tile, count in zip(lists.tolist(), counts, strict=True)]


def by_the_rule(q: Tensor, pages: Pages, row: int, prompt: int, rule: StemRule) -> list[list[list[int]]]:
    """Pair by pair along the anti-diagonals, in float64; the whole prompt is new."""
    keys, values = dense(pages, row)
    tokens, heads, head_dim = q.shape
    group, stride = heads // len(keys), rule.stride
    kept = kept_blocks(rule, prompt)
    result = []
    for block in range(-(-tokens // 128)):
        own = range(block * 128, min(tokens, block * 128 + 128))
        tile = []
        for head in range(heads):
            scores = []
            for other in range(block + 1):
                theirs = range(other * 128, min(tokens, other * 128 + 128))
                total = torch.zeros((), dtype=torch.float64)
                for residue in range(stride):
                    mine = [t for t in own if t % stride == residue]
                    facing = [t for t in theirs if t % stride == stride - 1 - residue]
                    if mine and facing:
                        total += q[mine, head].double().sum(0) @ keys[head // group, facing].sum(0)
                total *= stride**2 / (128 * len(own)) * head_dim**-0.5
                norm = max(values[head // group, t].norm().item() for t in theirs)
                scores.append(total.item() + rule.value_weight * max(0.0, math.log(norm)))
            always = {j for j in range(block + 1) if j < rule.sink or j >= block - rule.window}
            order = sorted(range(block + 1), key=lambda j: (j not in always, -scores[j], -j))
            tile.append(sorted(order[: kept[block]], reverse=True))
        result.append(tile)
    return result


def test_the_reference_follows_the_rule() -> None:
    length, rule = 1100, replace(SMALL, stride=8)
    pages = make_pages([length], 2, 16, torch.float32)
    q = torch.randn(length, 4, 16, generator=torch.Generator().manual_seed(1))
    plan = sparse_plan(rule, [length], [length], [length])
    found = stem_select(q, pages.k, pages.v, pages.table, pages.lens, plan)
    assert lists_of(found, plan) == by_the_rule(q, pages, 0, length, rule)
    assert sum(plan.in_order[:, 5].tolist()) < 9 * 10 // 2


def test_a_vector_that_all_keys_share_moves_no_choice() -> None:
    """Pages may leave out the mean of keys: every block but the newest, which is always kept, has as many keys."""
    length = 1100
    pages = make_pages([length], 2, 16, torch.float32)
    q = torch.randn(length, 4, 16, generator=torch.Generator().manual_seed(1))
    plan = sparse_plan(SMALL, [length], [length], [length])
    shared = torch.tensor([3.0, -2.0])[:, None, None] * torch.randn(16, generator=torch.Generator().manual_seed(2))
    found, expected = (stem_select(q, k, pages.v, pages.table, pages.lens, plan) for k in (pages.k - shared, pages.k))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [FP8] if DEVICE == "cpu" else [torch.bfloat16, FP8], ids=str)
def test_the_kernels_equal_the_reference(dtype: torch.dtype) -> None:
    """Two sparse rows with a prefix and one that keeps all; an element of a list may differ where scores are equal
    within rounding.
    """
    q_lens, lens, prompts = [140, 40, 130], [900, 77, 600], [1300, None, 600]
    pages = make_pages(lens, 2, 32, dtype, DEVICE)
    q = torch.randn(sum(q_lens), 4, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE).to(dtype)
    plan = sparse_plan(SMALL, q_lens, lens, prompts, DEVICE)
    extra = scales(q.shape[:2], 2, per_head=True, device=DEVICE) if dtype == FP8 else {}
    arguments = {"scale": None, "q_scale": None, "k_scale": None, "v_scale": None} | extra
    found = launch_select(
        q, *pages[:3], plan, torch.float16 if DEVICE == "cpu" else torch.bfloat16, **arguments, chain=DEVICE == "cuda"
    )
    exact = stem_select_reference(q, *pages[:3], plan, dtype=torch.float64, **extra)
    pairs = list(zip(lists_of(found, plan), lists_of(exact, plan), strict=True))
    differing = sum(len(set(a) - set(b)) for x, y in pairs for a, b in zip(x, y, strict=True))
    assert differing <= 4
    for tile, (lists, _) in zip(plan.in_order.tolist(), pairs, strict=True):
        own = tile[3] // 128
        for blocks in lists:
            assert len(blocks) == tile[5]
            assert blocks == sorted(set(blocks), reverse=True)
            assert {own, max(0, own - 1), 0} <= set(blocks)


@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(1, 11), max_size=4, unique=True), prompt=st.integers(1300, 1536), beyond=st.booleans())
def test_chunks_select_what_the_whole_prompt_does(cuts: list[int], prompt: int, beyond: bool) -> None:
    """Also on pages that a longer sequence has gone on to fill."""
    torch.set_num_threads(1)
    pages = make_pages([prompt + 200 * beyond], 1, 16, torch.float32)
    q = torch.randn(prompt, 2, 16, generator=torch.Generator().manual_seed(prompt))
    whole_plan = sparse_plan(SMALL, [prompt], [prompt], [prompt])
    lens = torch.tensor([prompt], dtype=torch.int32)
    whole = lists_of(stem_select(q, pages.k, pages.v, pages.table, lens, whole_plan), whole_plan)
    bounds = [0, *sorted(cut * 128 for cut in cuts if cut * 128 < prompt), prompt]
    parts = []
    for begin, end in itertools.pairwise(bounds):
        plan = sparse_plan(SMALL, [end - begin], [end], [prompt])
        lens = torch.tensor([end], dtype=torch.int32)
        parts += lists_of(stem_select(q[begin:end].contiguous(), pages.k, pages.v, pages.table, lens, plan), plan)
    assert parts == whole


@given(
    tokens=st.integers(1, 200_000),
    budget=st.sampled_from([0.1, 0.25, 0.6, 1.0]),
    rule=st.sampled_from(["share", "paper", "released"]),
)
@settings(max_examples=40, deadline=None)
def test_budgets_are_bounded_and_decay(tokens: int, budget: float, rule: str) -> None:
    kept = kept_blocks(StemRule(budget=budget, rule=rule), tokens)  # type: ignore[arg-type]
    assert len(kept) == -(-tokens // 128)
    assert all(min(i + 1, 9) <= k <= i + 1 for i, k in enumerate(kept))
    limited = [k for i, k in enumerate(kept) if k < i + 1]
    assert limited == sorted(limited, reverse=True)
    if rule == "share":
        floor = sum(min(i + 1, 9) for i in range(len(kept)))
        assert sum(kept) <= max(floor, budget * len(kept) * (len(kept) + 1) / 2 + 1e-6)


def test_the_tail_keeps_everything_out_of_the_same_budget() -> None:
    rule = StemRule(budget=0.25, tail=3)
    kept, without = kept_blocks(rule, 128 * 100), kept_blocks(replace(rule, tail=0), 128 * 100)
    assert kept[-3:] == (98, 99, 100)
    assert all(a < b for a, b in zip(kept[60:-3], without[60:-3], strict=True))
    assert sum(without) - 100 <= sum(kept) <= 0.25 * 100 * 101 / 2
    assert kept_blocks(rule, 200) == (1, 2)


@pytest.mark.parametrize(
    ("kilotokens", "decay", "share"),
    [(64, 1.0, 0.29), (64, 0.7, 0.25), (128, 1.0, 0.24), (256, 0.7, 0.185), (16, 0.7, 0.6)],
)
def test_the_released_rule_keeps_the_known_shares(kilotokens: int, decay: float, share: float) -> None:
    kept = kept_blocks(StemRule(rule="released", decay=decay, sink=0, window=0), kilotokens * 1024)
    assert abs(sum(kept) / (len(kept) * (len(kept) + 1) / 2) - share) < 0.01


def test_tiles_are_cut_at_multiples_of_128_and_come_heaviest_first() -> None:
    plan = sparse_plan(SMALL, [200, 100], [1000, 100], [1000, None])
    assert plan.in_order[:, :5].tolist() == [
        [0, 0, 96, 800, 1000], [0, 96, 200, 896, 1000], [1, 200, 300, 0, 100]
    ]  # fmt: skip
    counts = plan.pieces[:, 5].tolist()
    assert counts == sorted(counts, reverse=True)
    assert plan.in_order[:, 7].tolist() == [0, 0, -1]
    assert plan.most == max(counts)
    beyond = sparse_plan(SMALL, [600], [1600], [1100]).in_order.tolist()
    assert [record[5] == record[3] // 128 + 1 for record in beyond] == [False] * 2 + [True] * 4


@given(
    contexts=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 200_000)), min_size=1, max_size=4),
    tail=st.sampled_from([0, 4]),
    heads=st.sampled_from([1, 8, 64]),
)
@settings(max_examples=40, deadline=None)
def test_pieces_make_up_the_lists_and_none_is_long(contexts: list[tuple[int, int]], tail: int, heads: int) -> None:
    new, lengths = [q for q, _ in contexts], [q + before for q, before in contexts]
    plan = sparse_plan(StemRule(tail=tail), new, lengths, lengths, heads=heads)
    entries: dict[int, list[int]] = {tile: [] for tile in range(plan.tiles)}
    partials: dict[int, list[int]] = {tile: [] for tile in range(plan.tiles)}
    longest = max(16, plan.in_order[:, 5].sum().item() * heads // 264)
    for *_, count, tile, begin, partial in plan.pieces.tolist():
        assert 0 < count <= longest
        entries[tile] += range(begin, begin + count)
        partials[tile] += [partial] if partial >= 0 else []
    cuts = {(first, end): [begin, parts] for begin, parts, first, end in plan.cuts.tolist()}
    for _, first, end, _, _, count, tile, _ in plan.in_order.tolist():
        assert sorted(entries[tile]) == list(range(count))
        begin, parts = cuts.get((first, end), [0, 0])
        assert sorted(partials[tile]) == list(range(begin, begin + parts))
    assert sorted(itertools.chain.from_iterable(partials.values())) == list(range(plan.partials))
    weights = plan.pieces[:, 5].tolist()
    assert weights == sorted(weights, reverse=True)


def test_what_does_not_fit_is_named() -> None:
    for fields, message in (
        ({"budget": 0.0}, "budget must be above 0"), ({"decay": 1.5}, "decay must be"), ({"stride": 24}, "stride must"),
        ({"sink": -1}, "sink and window must not be negative"), ({"tail": -1}, "tail must not be negative"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            StemRule(**fields)  # type: ignore[arg-type]
