"""Reductions over peers: the arithmetic with ranks run in turn, rounds of ranks that run at once on a GPU.

On a GPU eight ranks are eight streams of one process, with late ranks, changing shapes and thousands of rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from katydid_kernels.peer_reduce import (
    PeerReducer,
    add_rms_norm_of_ranks_reference,
    emulated_peers,
    quantized_all_gather_reference,
    quantized_reduce_scatter_reference,
)
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANKS, HIDDEN, EPS = 4, 96, 1e-5
FEW, TOKENS, CTAS = 8, 24, 3
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def reducers(ranks: int = RANKS, hidden: int = HIDDEN, **sizes: int) -> list[PeerReducer]:
    sizes = {"few_tokens": FEW, "tokens": TOKENS, "ctas": CTAS} | sizes
    shape = {name: sizes[name] for name in ("few_tokens", "tokens", "ctas")}
    memories = emulated_peers(ranks, PeerReducer.nbytes(ranks, hidden, **shape), DEVICE)
    return [PeerReducer(memory, hidden, **sizes) for memory in memories]


def rows(*shape: int, seed: int) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    # Zeros of both signs are data, too.
    return torch.where(x.abs() < 0.1, x * 0.0, x).to(torch.bfloat16).to(DEVICE)


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def dequantised(q: Tensor, scale: Tensor | None) -> Tensor:
    return q.float() if scale is None else q.float() * scale[:, None]


def shares(x: Tensor, share: int, ranks: int) -> list[Tensor]:
    return [x[rank * share : (rank + 1) * share].contiguous() for rank in range(ranks)]


def assert_same(found: Tensor, expected: Tensor) -> None:
    if DEVICE == "cuda":
        assert torch.equal(found, expected)
    else:
        assert error(found, expected) < 8e-3  # the interpreter truncates its bf16 casts


# e4m3 keeps 4 bits: rounding is 2^-4 at most and about 2^-5.3 in norm; bf16 2^-9.
LIMIT = {False: 2.5e-3, True: 3.2e-2} if DEVICE == "cuda" else {False: 1.5e-2, True: 0.12}


@pytest.mark.parametrize("fp8", [False, True])
def test_few_rows_round_after_round(fp8: bool) -> None:
    group, weight = reducers(), torch.rand(HIDDEN, device=DEVICE) + 0.5
    for number, tokens in enumerate((1, 2) if fp8 else (3, 8, 1, 2)):
        summands = [rows(tokens, HIDDEN, seed=10 * number + rank) for rank in range(RANKS)]
        residual = rows(tokens, HIDDEN, seed=99 + number)
        outputs = []
        for phase in ({"send": True, "receive": False}, {"send": False, "receive": True}):
            for reducer, x in zip(group, summands, strict=True):
                y, scale = reducer._result(tokens, fp8)
                y.view(torch.uint8).fill_(0x7F)
                total = torch.full_like(residual, float("nan"))
                reducer._few(x, residual, total, weight, EPS, y, scale, early=False, **phase)
                outputs.append((y, scale, total))
        expected, expected_total = add_rms_norm_of_ranks_reference(summands, residual, weight, EPS)
        for y, scale, total in outputs[RANKS:]:
            assert_same(total, expected_total)
            assert error(dequantised(y, scale), expected) < LIMIT[fp8]
            assert torch.equal(y.view(torch.uint8), outputs[RANKS][0].view(torch.uint8))
    for reducer in group:
        reducer.check()


def test_few_rows_are_summed() -> None:
    group = reducers()
    summands = [rows(3, HIDDEN, seed=rank) for rank in range(RANKS)]
    sums = [torch.full_like(x, float("nan")) for x in summands]
    for phase in ({"send": True, "receive": False}, {"send": False, "receive": True}):
        for reducer, x, total in zip(group, summands, sums, strict=True):
            reducer._few(x, None, None, None, 0.0, total, None, early=False, **phase)
    expected = torch.stack([x.float() for x in summands]).sum(0).to(torch.bfloat16)
    for total in sums:
        assert_same(total, expected)


@pytest.mark.parametrize(
    ("tokens", "quantized", "fp8"),
    [(24, False, False), (21, False, True), (21, True, True), (2, False, False), (2, True, True)],
)
def test_many_rows(tokens: int, quantized: bool, fp8: bool) -> None:
    group, weight = reducers(), torch.rand(HIDDEN, device=DEVICE) + 0.5
    share = -(-tokens // RANKS)
    summands = [rows(tokens, HIDDEN, seed=rank) for rank in range(RANKS)]
    residual = rows(tokens, HIDDEN, seed=50)
    residuals = shares(residual, share, RANKS)
    totals, owned = ([torch.full_like(own, float("nan")) for own in residuals] for _ in range(2))
    for phase in ({"send": True, "receive": False}, {"send": False, "receive": True}):
        for reducer, x, own, total, y in zip(group, summands, residuals, totals, owned, strict=True):
            reducer._many(x, own, total, weight, EPS, y, quantized=quantized, fp8=fp8, sync=False, early=False, **phase)
    if quantized:
        summands = [travelled(x, rank, share) for rank, x in enumerate(summands)]
    expected, expected_total = add_rms_norm_of_ranks_reference(summands, residual, weight, EPS)
    if quantized:
        assert error(torch.cat(totals), expected_total) < (2e-3 if DEVICE == "cuda" else 0.1)
    else:
        assert_same(torch.cat(totals), expected_total)
        assert error(torch.cat(owned), expected) < LIMIT[False]
    for reducer in group:
        assert error(dequantised(*reducer._many_result(tokens, fp8)), expected) < LIMIT[fp8]


def travelled(x: Tensor, rank: int, share: int) -> Tensor:
    """A rank's summand as it reaches the owners of its rows: its own rows as they are."""
    q, scale = quantized_all_gather_reference([x])
    sent = q.float() * scale[:, None]
    own = slice(rank * share, (rank + 1) * share)
    sent[own] = x[own].float()
    return sent


def test_quantised_gather_and_scatter() -> None:
    group, share = reducers(), 5
    parts = [rows(share, HIDDEN, seed=rank) for rank in range(RANKS)]
    for reducer, part in zip(group, parts, strict=True):
        reducer._gather(part, sync=False, early=False)
    expected, scales = quantized_all_gather_reference(parts)
    for reducer in group:
        found = reducer._view("gathered", torch.float8_e4m3fn, share * RANKS, HIDDEN)
        found_scales = reducer._view("gathered scales", torch.float32, share * RANKS)
        torch.testing.assert_close(found_scales, scales, rtol=1e-6, atol=0)
        limit = 1e-3 if DEVICE == "cuda" else 0.1  # the interpreter truncates its fp8 casts
        assert error(dequantised(found, found_scales), dequantised(expected, scales)) < limit
    for number in range(2):
        summands = [rows(share * RANKS, HIDDEN, seed=10 * number + rank) for rank in range(RANKS)]
        outs = [torch.full((share, HIDDEN), float("nan"), dtype=torch.bfloat16, device=DEVICE) for _ in range(RANKS)]
        for phase in ({"send": True, "receive": False}, {"send": False, "receive": True}):
            for reducer, x, out in zip(group, summands, outs, strict=True):
                reducer._scatter(x, out, sync=False, early=False, **phase)
        for rank, out in enumerate(outs):
            limit = 3e-3 if DEVICE == "cuda" else 0.1
            assert error(out, quantized_reduce_scatter_reference(summands, rank)) < limit


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="ranks must be a power of two, got 3"):
        PeerReducer(emulated_peers(3, 64, DEVICE)[0], 32)
    with pytest.raises(ValueError, match="hidden must be a multiple of 16, got 20"):
        PeerReducer(emulated_peers(2, 64, DEVICE)[0], 20)
    with pytest.raises(ValueError, match=r"memory must have \d+ bytes a rank, got 64"):
        PeerReducer(emulated_peers(2, 64, DEVICE)[0], 32)
    reducer = reducers()[0]
    x = rows(FEW + 1, HIDDEN, seed=0)
    with pytest.raises(ValueError, match="x must have at most 8 rows, got 9"):
        reducer.all_reduce_few(x, x, x[0], EPS)
    with pytest.raises(ValueError, match=r"x must be contiguous bf16 \[T, 96\]"):
        reducer.all_reduce_few(x.float(), x, x[0], EPS)
    with pytest.raises(ValueError, match="x must have at most 24 rows, got 25"):
        reducer.all_reduce_many(rows(25, HIDDEN, seed=0), x, x[0], EPS)
    with pytest.raises(ValueError, match="x must have a multiple of 4 rows, got 6"):
        reducer.quantized_reduce_scatter(rows(6, HIDDEN, seed=0))


class Streams:
    """Ranks that run at once: a stream each, and now and then one that comes late."""

    def __init__(self, ranks: int, seed: int) -> None:
        held: list[Tensor] = []
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        for stream in self.streams:
            # The driver takes memory and loads a kernel (the sleep of a late rank, too) when all that runs has ended,
            # and who runs waits for the rank whose call that is: it would give it up. So both are there already.
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1)
                held += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (1 << 26, *[1 << 20] * 4)]
        torch.cuda.synchronize()
        self.random = random.Random(seed)

    def run(self, calls: Sequence[Callable[[], object]]) -> list:
        order = list(range(len(calls)))
        self.random.shuffle(order)
        late = self.random.randrange(len(calls)) if self.random.random() < 0.1 else None
        found = {}
        for rank in order:
            with torch.cuda.stream(self.streams[rank]):
                if rank == late:
                    torch.cuda._sleep(200_000)
                found[rank] = calls[rank]()
        return [found[rank] for rank in range(len(calls))]

    def wait(self) -> None:
        torch.cuda.synchronize()


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_at_once(ranks: int) -> None:
    """Every kind of call, shapes that change, data that are compared each round."""
    hidden, ctas = 4096, 128 // ranks
    group = reducers(ranks, hidden, few_tokens=16, tokens=64 * ranks, ctas=ctas, patience=1 << 20)
    weight = torch.rand(hidden, device="cuda") + 0.5
    streams = Streams(ranks, ranks)
    for number in range(40):
        tokens = streams.random.choice([1, 2, 7, 16])
        fp8 = number % 3 == 0
        summands = [rows(tokens, hidden, seed=100 * number + rank) for rank in range(ranks)]
        residual = rows(tokens, hidden, seed=77 + number)
        torch.cuda.synchronize()
        few = streams.run([
            partial(reducer.all_reduce_few, x, residual, weight, EPS, fp8=fp8)
            for reducer, x in zip(group, summands, strict=True)
        ])  # fmt: skip
        streams.wait()
        expected, total = add_rms_norm_of_ranks_reference(summands, residual, weight, EPS)
        for y, scale, found in few:
            assert torch.equal(found, total)
            assert error(dequantised(y, scale), expected) < LIMIT[fp8]
        sums = streams.run([partial(reducer.sum_few, x) for reducer, x in zip(group, summands, strict=True)])
        streams.wait()
        for found in sums:
            assert torch.equal(found, torch.stack([x.float() for x in summands]).sum(0).to(torch.bfloat16))
        many = streams.random.choice([ranks, 64 * ranks, 64 * ranks - 3])
        share = -(-many // ranks)
        summands = [rows(many, hidden, seed=100 * number + rank) for rank in range(ranks)]
        residual = rows(many, hidden, seed=78 + number)
        torch.cuda.synchronize()
        found = streams.run([
            partial(reducer.all_reduce_many, x, part, weight, EPS, fp8=fp8)
            for reducer, x, part in zip(group, summands, shares(residual, share, ranks), strict=True)
        ])  # fmt: skip
        streams.wait()
        expected, total = add_rms_norm_of_ranks_reference(summands, residual, weight, EPS)
        assert torch.equal(torch.cat([result[2] for result in found]), total)
        for y, scale, _ in found:
            assert error(dequantised(y, scale), expected) < LIMIT[fp8]
        found = streams.run([
            partial(reducer.all_reduce_many, x, part, weight, EPS, quantized=True, fp8=True)
            for reducer, x, part in zip(group, summands, shares(residual, share, ranks), strict=True)
        ])  # fmt: skip
        streams.wait()
        assert error(torch.cat([result[2] for result in found]), total) < 3e-2
        for y, scale, _ in found:
            assert error(dequantised(y, scale), expected) < 5e-2
            assert torch.equal(y.view(torch.uint8), found[0][0].view(torch.uint8))
        parts = [x[:share].contiguous() for x in summands]
        torch.cuda.synchronize()
        gathered = streams.run([
            partial(reducer.quantized_all_gather, part)
            for reducer, part in zip(group, parts, strict=True)
        ])  # fmt: skip
        streams.wait()
        q, scales = quantized_all_gather_reference(parts)
        for found_q, found_scales in gathered:
            assert error(dequantised(found_q, found_scales), dequantised(q, scales)) < 1e-3
        whole = [torch.cat([x] * ranks)[: share * ranks].contiguous() for x in summands]
        torch.cuda.synchronize()
        scattered = streams.run([
            partial(reducer.quantized_reduce_scatter, x)
            for reducer, x in zip(group, whole, strict=True)
        ])  # fmt: skip
        streams.wait()
        for rank, out in enumerate(scattered):
            assert error(out, quantized_reduce_scatter_reference(whole, rank)) < 3e-3
    for reducer in group:
        reducer.check()


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("rounds", [100_000])
def test_a_hundred_thousand_rounds(rounds: int) -> None:
    """Graphs of rounds, replayed without any wait between ranks; every round's sum is counted into a checksum."""
    ranks, hidden, tokens, inside = 8, 4096, 2, 500
    group = reducers(ranks, hidden, few_tokens=tokens, tokens=8 * ranks, ctas=8, patience=1 << 22)
    weight = torch.ones(hidden, device="cuda")
    data = [[rows(tokens, hidden, seed=7 * number + rank) for rank in range(ranks)] for number in range(inside)]
    residual = torch.zeros(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    wrong = [torch.zeros(1, device="cuda") for _ in range(ranks)]
    expected = [add_rms_norm_of_ranks_reference(summands, residual, weight, EPS)[1] for summands in data]
    streams, graphs = [torch.cuda.Stream() for _ in range(ranks)], []
    warm = Streams(ranks, 0)
    warm.run([
        partial(reducer.all_reduce_few, x, residual, weight, EPS)
        for reducer, x in zip(group, data[0], strict=True)
    ])  # fmt: skip
    warm.wait()
    for rank, reducer in enumerate(group):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[rank]):
            for summands, total in zip(data, expected, strict=True):
                found = reducer.all_reduce_few(summands[rank], residual, weight, EPS)[2]
                wrong[rank] += (found != total).any()
        graphs.append(graph)
    for replay in range(rounds // inside):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        if replay % 20 == 0:
            torch.cuda.synchronize()
            for reducer in group:
                reducer.check()
    torch.cuda.synchronize()
    for reducer in group:
        reducer.check()
    assert [float(count) for count in wrong] == [0.0] * ranks


@pytest.mark.gpu
@gpu
def test_a_rank_that_stays_away_ends_in_an_error() -> None:
    group = reducers(2, 4096, patience=2000)
    x = rows(2, 4096, seed=0)
    group[0].all_reduce_few(x, x, x[0], EPS)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="a rank did not come in time"):
        group[0].check()
