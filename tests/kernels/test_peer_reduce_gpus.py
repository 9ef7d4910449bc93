"""Reductions between real GPUs: calls of every kind and size, late ranks, replayed graphs, against float64."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

GPUS = 1 << torch.cuda.device_count().bit_length() >> 1
HIDDEN, FEW, MANY, EPS = 4096, 128, 2048, 1e-5
EAGER, GRAPHS, REPLAYS, INSIDE = 400, 4, 50, 20
# Relative, in norm: bf16 keeps 8 bits, e4m3 four; two roundings where rows travel in e4m3, too.
BF16, E4M3, TWICE = 2.5e-3, 3.2e-2, 5e-2


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs several GPUs")
@pytest.mark.timeout(240)
def test_rounds_between_gpus(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(GPUS), f"file://{tmp_path}/meet"]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(GPUS)]
    until = time.monotonic() + 200
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            assert time.monotonic() < until
            time.sleep(0.1)
        assert [rank.wait(20) for rank in ranks] == [0] * GPUS
    finally:
        for rank in ranks:
            rank.kill()


class Rank:
    """One GPU. All draw the same sizes, and each can draw the others' rows."""

    def __init__(self, rank: int, ranks: int, meet: str) -> None:
        import torch.distributed as dist
        from katydid_kernels import PeerReducer, symmetric_peers

        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", init_method=meet, rank=rank, world_size=ranks, device_id=self.device)
        sizes = {"few_tokens": FEW, "tokens": MANY}
        memory = symmetric_peers(dist.group.WORLD, PeerReducer.nbytes(ranks, HIDDEN, **sizes), self.device)
        self.reducer = PeerReducer(memory, HIDDEN, patience=1 << 24, **sizes)
        self.rank, self.ranks = rank, ranks
        self.meet = dist.barrier
        self.weight = self.rows(0, 1).float()[0] + 2.0

    def rows(self, seed: int, count: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.randn(count, HIDDEN, generator=generator, device=self.device)
        return torch.where(x.abs() < 0.1, x * 0.0, x).to(torch.bfloat16)  # zeros of both signs are data, too

    def summands(self, seed: int, count: int) -> list[torch.Tensor]:
        return [self.rows(seed + 1 + rank, count) for rank in range(self.ranks)]

    def normed(self, total: torch.Tensor) -> torch.Tensor:
        total = total.double()
        return total * (total.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weight.double()

    def share(self, x: torch.Tensor) -> torch.Tensor:
        each = -(-len(x) // self.ranks)
        return x[self.rank * each : (self.rank + 1) * each].contiguous()

    def few(self, seed: int, tokens: int, *, fp8: bool) -> None:
        x, residual = self.summands(seed, tokens), self.rows(seed, tokens)
        y, scale, total = self.reducer.all_reduce_few(x[self.rank], residual, self.weight, EPS, fp8=fp8)
        exact = sum((each.double() for each in x), residual.double())
        close(total, exact, BF16)
        close(y.float() if scale is None else y.float() * scale[:, None], self.normed(total), E4M3 if fp8 else BF16)
        close(self.reducer.sum_few(x[self.rank]), exact - residual.double(), BF16)

    def many(self, seed: int, tokens: int, *, fp8: bool, quantized: bool) -> None:
        x, residual = self.summands(seed, tokens), self.rows(seed, tokens)
        y, scale, total = self.reducer.all_reduce_many(
            x[self.rank], self.share(residual), self.weight, EPS, fp8=fp8, quantized=quantized
        )
        exact = sum((each.double() for each in x), residual.double())
        close(total, self.share(exact), E4M3 if quantized else BF16)
        limit = TWICE if quantized else E4M3 if fp8 else BF16
        close(y.float() if scale is None else y.float() * scale[:, None], self.normed(exact), limit)

    def exchanged(self, seed: int, tokens: int) -> None:
        x = self.summands(seed, tokens * self.ranks)
        q, scales = self.reducer.quantized_all_gather(self.share(x[self.rank]))
        parts = [own[rank * tokens : (rank + 1) * tokens] for rank, own in enumerate(x)]
        close(q.float() * scales[:, None], torch.cat(parts).double(), E4M3)
        exact = sum(each.double() for each in x)
        assert isinstance(exact, torch.Tensor)
        close(self.reducer.quantized_reduce_scatter(x[self.rank]), self.share(exact), E4M3)

    def replayed(self, seed: int, tokens: int) -> None:
        """A graph of calls, replayed with nothing between the replays: every sum is compared on the device."""
        drawn = [
            (self.summands(seed + 100 * call, tokens), self.rows(seed + 100 * call, tokens)) for call in range(INSIDE)
        ]
        exact = [sum((each.float() for each in x), residual.float()).to(torch.bfloat16) for x, residual in drawn]
        wrong = torch.zeros((), device=self.device)
        torch.cuda.synchronize()
        self.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for (x, residual), total in zip(drawn, exact, strict=True):
                found = self.reducer.all_reduce_few(x[self.rank], residual, self.weight, EPS)[2]
                wrong += ((found.float() - total.float()).abs() > 0.01 * (1 + total.float().abs())).any()
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        assert wrong.item() == 0, f"{tokens} tokens, rank {self.rank}: {wrong.item()} of {INSIDE * REPLAYS} sums"


def close(found: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    error = ((found.double() - expected).norm() / expected.norm()).item() if expected.numel() else 0.0
    assert error < limit, f"{list(found.shape)}: {error:.1e}, at most {limit}"


def main(ranks: int, meet: str, rank: int) -> None:
    own, chooser = Rank(rank, ranks, meet), random.Random(1)
    for number in range(EAGER):
        late, tokens = chooser.randrange(4 * ranks), chooser.choice([1, 2, 7, 31, 32, 33, FEW, chooser.randint(1, FEW)])
        if late == rank:
            torch.cuda._sleep(400_000)  # type: ignore[no-untyped-call]
        seed = 1000 * number
        own.few(seed, tokens, fp8=number % 2 == 1)
        if number % 4 == 0:
            rows = chooser.choice([ranks, ranks + 1, MANY, MANY - 3, chooser.randint(1, MANY)])
            own.many(seed, rows, fp8=number % 8 == 0, quantized=number % 16 == 0)
            own.exchanged(seed, chooser.randint(1, MANY // ranks))
        own.reducer.check()
    for number, tokens in itertools.product(range(GRAPHS), (1, 8, FEW)):
        own.replayed(10_000_000 + 10_000 * number, tokens)
        own.reducer.check()
    own.meet()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
