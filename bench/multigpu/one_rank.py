"""One rank of a run: its device, the others' pace, and the rows that it tells."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from katydid_engine.layers.part_copies import PartCopies
from katydid_engine.parallel import ParallelPlan
from katydid_engine.rank_groups import RankGroups
from katydid_kernels.peer_reduce import PeerReducer, symmetric_peers
from shares import Share, build_share, cut_hy3
from telling import Told, row

__all__ = ["CHUNK", "Rank"]

CHUNK = 8192
# As an engine has them.
FEW_TOKENS, FEW_TOKENS_OF_ALL = 128, 256
# Of each row, eight experts and the shared one, with their weights.
TOLD = 18


class Rank:
    def __init__(self, rank: int, ranks: int, meet: str, told: Told, *, layers: int, dry: bool) -> None:
        self.rank, self.ranks, self.layers, self.dry = rank, ranks, 2 if dry else layers, dry
        self.device = torch.device("cpu" if dry else f"cuda:{rank}")
        torch.set_num_threads(1)
        if dry:
            dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
        else:
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", init_method=meet, rank=rank, world_size=ranks, device_id=self.device)
        # Of the plan that others are compared with, by kind and size.
        self.of_tp: dict[tuple[str, int], float] = {}
        self._told = told

    def note(
        self, figure: str, value: float, unit: str, bar: float | None = None, *, most: bool = True, **more: float | None
    ) -> None:
        """Tells a row, on rank 0."""
        if self.rank == 0:
            rounded = {name: None if number is None else round(number, 5) for name, number in more.items()}
            self._told.tell([row(figure, value, unit, bar, most=most) | rounded])

    def peers(self, plan: ParallelPlan, groups: RankGroups, hidden: int, tokens: int) -> PeerReducer | None:
        if self.dry or plan.tp == 1:
            return None
        sizes = {"few_tokens": FEW_TOKENS, "tokens": tokens if plan.sp else plan.tp}
        size = PeerReducer.nbytes(plan.tp, hidden, **sizes)
        memory = symmetric_peers(groups.tensor.group, size, self.device)  # type: ignore[attr-defined]
        return PeerReducer(memory, hidden, **sizes)

    def expert_peers(self, plan: ParallelPlan, groups: RankGroups, hidden: int) -> PeerReducer | None:
        if self.dry or plan.tp > 1 or plan.ep == 1 or plan.redundant_experts:
            return None
        sizes = {"few_tokens": FEW_TOKENS_OF_ALL, "tokens": plan.ep}
        size = PeerReducer.nbytes(plan.ep, hidden, **sizes)
        memory = symmetric_peers(groups.experts.group, size, self.device)  # type: ignore[attr-defined]
        return PeerReducer(memory, hidden, **sizes)

    def copies(self, groups: RankGroups, hidden: int, tokens: int) -> PartCopies | None:
        """For chunks of ``tokens`` whose parts take turns."""
        if self.dry:
            return None
        sizes = {"tokens": -(-tokens // 2), "told": TOLD}
        size = PartCopies.nbytes(self.ranks, hidden, **sizes)
        return PartCopies(symmetric_peers(groups.tensor.group, size, self.device), hidden, **sizes)  # type: ignore[attr-defined]

    def share(self, plan: ParallelPlan, groups: RankGroups, *, micro_batches: int = 1, skewed: bool = False) -> Share:
        config = cut_hy3(self.layers, dry=self.dry)
        peers = self.peers(plan, groups, config.hidden_size, CHUNK)
        return build_share(config, plan, groups, self.device, peers, micro_batches=micro_batches, skewed=skewed)

    def seconds(self, call: Callable[[], object], repeats: int) -> list[float]:
        """Of each call, after two that are not counted; every rank is done before the next begins."""
        times = []
        for index in range(repeats + 2):
            self.meet()
            started = time.perf_counter()
            call()
            self.meet()
            if index > 1:
                times.append(time.perf_counter() - started)
        return times

    def together(self, call: Callable[[], float]) -> float:
        """Seconds that every rank's call takes, begun together; the slowest rank's."""
        self.meet()
        return self.slowest(call())

    def slowest(self, seconds: float) -> float:
        return self.slowest_of([seconds])[0]

    def slowest_of(self, seconds: list[float]) -> list[float]:
        """The slowest rank's, of each."""
        most = torch.tensor(seconds, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        slowest: list[float] = most.tolist()
        return slowest

    def meet(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()
        dist.barrier()
        if not self.dry:
            torch.cuda.synchronize()
