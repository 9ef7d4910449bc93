"""One rank of ``run.py``: arguments rank, ranks, where to meet, the jobs, where rank 0 tells of each that is done."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from katydid_engine.eplb.rebalancer import Rebalancer
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.lockstep import Lockstep
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.parallel import ParallelPlan
from katydid_engine.rank_groups import RankGroups, join_groups
from katydid_engine.rank_slice.absent_ranks import AbsentRanks
from katydid_engine.rank_slice.steps import Decoding
from katydid_kernels.peer_reduce import PeerReducer, symmetric_peers
from serving import Share, build_share, cut_hy3, steps_of

CHUNK = 8192
AGREEMENT = 0.85
FEW_TOKENS = 128
LONG = 65536
TINY = Path(__file__).parents[2] / "models" / "hy3-tiny"
Rows = list[dict[str, Any]]


class Rank:
    def __init__(self, rank: int, ranks: int, meet: str, *, layers: int, dry: bool) -> None:
        self.rank, self.ranks, self.layers, self.dry = rank, ranks, 2 if dry else layers, dry
        self.device = torch.device("cpu" if dry else f"cuda:{rank}")
        torch.set_num_threads(1)
        if dry:
            dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
        else:
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", init_method=meet, rank=rank, world_size=ranks, device_id=self.device)
        self.of_tp: dict[tuple[str, int], float] = {}
        self.rows: Rows = []

    def note(self, figure: str, value: float, unit: str, bar: float | None = None, *, most: bool = True) -> None:
        met = None if bar is None else bool(value <= bar if most else value >= bar)
        self.rows.append({"figure": figure, "value": round(value, 5), "unit": unit, "bar": bar, "met": met})

    def peers(self, plan: ParallelPlan, groups: RankGroups, hidden: int, tokens: int) -> PeerReducer | None:
        if self.dry or plan.tp == 1:
            return None
        sizes = {"few_tokens": FEW_TOKENS, "tokens": tokens if plan.sp else plan.tp}
        size = PeerReducer.nbytes(plan.tp, hidden, **sizes)
        memory = symmetric_peers(groups.tensor.group, size, self.device)  # type: ignore[attr-defined]
        return PeerReducer(memory, hidden, **sizes)

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
        most = torch.tensor(seconds, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)

    def meet(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()
        dist.barrier()
        if not self.dry:
            torch.cuda.synchronize()

    def correct(self, plan: ParallelPlan, groups: RankGroups) -> None:
        self._compare(plan, groups, torch.float32, bar=0.1 if plan.fp8_transfers else 1e-5)
        if not self.dry:
            self._compare(plan, groups, torch.bfloat16, bar=0.1)

    def _compare(self, plan: ParallelPlan, groups: RankGroups, dtype: torch.dtype, bar: float) -> None:
        ids = torch.randint(3, 4000, (300,), generator=torch.Generator().manual_seed(1)).tolist()
        pages = list(range(6))

        def run(model: DecoderLM) -> tuple[torch.Tensor, list[int]]:
            cache = model.new_kv_cache(6)
            pack = ForwardBatch.pack
            logits = model.logits(model.forward(pack([TokenRun(ids, 0, pages)], device=self.device), cache))
            tokens = [int(logits[-1].argmax())]
            for step in range(16):
                batch = pack([TokenRun([tokens[-1]], 300 + step, pages)], num_decodes=1, device=self.device)
                tokens.append(int(model.logits(model.forward(batch, cache)).argmax()))
            return logits, tokens

        options = {"device": self.device, "dtype": dtype}
        whole, tokens = run(load_model(TINY, **options))  # type: ignore[arg-type]
        peers = self.peers(plan, groups, 256, 1024) if dtype == torch.bfloat16 else None
        model = load_model(
            TINY,
            plan=plan,
            collectives=groups.tensor,
            experts=groups.experts,
            peers=peers,
            **options,  # type: ignore[arg-type]
        )
        self.meet()
        found, own = run(model)
        if peers is not None:
            peers.check()
        error = float((found - whole).norm() / whole.norm())
        name = str(dtype).removeprefix("torch.")
        self.note(f"correct, {plan}: relative error of logits, {name}", error, "", bar=bar)
        same = sum(a == b for a, b in zip(tokens, own, strict=True))
        exact = dtype == torch.float32 and not plan.fp8_transfers
        self.note(f"correct, {plan}: greedy tokens equal of 17, {name}", same, "", 17 if exact else None, most=False)

    def serve(
        self,
        plan: ParallelPlan,
        groups: RankGroups,
        lengths: list[int],
        batches: list[int],
        context: int,
        *,
        drafts: int = 0,
        peers: bool = True,
    ) -> None:
        config = cut_hy3(self.layers, mtp=drafts > 0, dry=self.dry)
        memory = self.peers(plan, groups, config.hidden_size, CHUNK) if peers else None
        share = build_share(config, plan, groups, self.device, memory)
        name = f"{plan}" + ("" if peers else " over NCCL") + (f", {drafts} drafts" if drafts else "")
        own = {batch: max(1, batch // plan.dp) for batch in batches}
        tokens = max([*lengths, *(rows * (context + 256) for rows in own.values())])
        # As in an engine: groups that share experts agree on every pass, and none plans one before the last is over.
        steps = steps_of(share, tokens, drafts, ahead=plan.dp == 1)
        for length in lengths if plan.dp == 1 else []:
            calls = 4 if length < LONG else 2
            took_s = sorted(self.together(partial(steps.prefill, length, CHUNK)) for _ in range(calls))[calls // 2 - 1]
            self.note(f"serve {length}, {name}: TTFT, {self.layers} layers", 1e3 * took_s, "ms")
            self._against_tp(f"serve {length}, {name}: TTFT lower than with tp{plan.tp}", plan, "", length, took_s)
        for batch in batches:
            rows = own[batch]
            if not self.dry and (plan.dp > 1 or batch == batches[0]):
                most = rows if plan.dp > 1 else max(batches)
                share.model.before_pass = None
                steps.capture(most, context + 256, agreement=AGREEMENT if drafts else None)
            if plan.dp > 1:
                share.model.before_pass = Lockstep(groups.step, share.model.take_part).enter
            took_s = self.slowest(float(np.median(Decoding(steps, rows, context).time(30, 6))))
            self.note(f"serve {batch} x {context}, {name}: a step, {self.layers} layers", 1e3 * took_s, "ms")
            figure = f"serve {batch} x {context}, {name}: a step shorter than with tp{self.ranks}"
            self._against_tp(figure, plan, f"{drafts} drafts", batch, took_s)
        if memory is not None:
            memory.check()

    def _against_tp(self, figure: str, plan: ParallelPlan, kind: str, size: int, took: float) -> None:
        """The first plan is plain TP; the others are compared with it."""
        if (kind, size) in self.of_tp:
            self.note(figure, 100 * (1 - took / self.of_tp[kind, size]), "%")
        elif plan == ParallelPlan(tp=plan.tp):
            self.of_tp[kind, size] = took

    def overlap(self, plan: ParallelPlan, groups: RankGroups, tokens: int) -> None:
        """How much of the time that rows take to their experts and back is seen, with a pass in one part and in two."""
        ids = [[7 + (self.rank + 3 * index) % 400 for index in range(tokens // 8)] for _ in range(8)]
        each = -(-len(ids[0]) // 64)
        runs = [TokenRun(run, 0, list(range(row * each, (row + 1) * each))) for row, run in enumerate(ids)]
        took = {}
        for way, parts in (("alone", 1), ("alone", 2), ("together", 1), ("together", 2)):
            present = groups
            if way == "alone":
                present = replace(groups, experts=AbsentRanks(groups.experts.rank, groups.experts.size))
            model = self.share(plan, present, micro_batches=parts).model
            cache = model.new_kv_cache(8 * each)
            step = partial(model.forward, ForwardBatch.pack(runs, device=self.device), cache)
            took[way, parts] = self.slowest(float(np.median(self.seconds(step, 7))))
            del model, cache, step
        for parts in (1, 2):
            name = f"overlap, {plan}, {tokens} tokens a rank: {parts} micro-batches, {self.layers} layers"
            self.note(name, 1e3 * took["together", parts], "ms")
            self.note(f"{name}, nothing sent", 1e3 * took["alone", parts], "ms")
        sent = took["together", 1] - took["alone", 1]
        seen = 100 * (took["together", 2] - took["alone", 2]) / sent
        self.note(f"overlap, {plan}, {tokens} tokens a rank: of the time for sending, seen with two", seen, "%", 15.0)

    def rebalance(self, plan: ParallelPlan, groups: RankGroups, batch: int, context: int, steps: int) -> None:
        """Decodes with routing as uneven as a trained model's; each step is told by what was under way in it."""
        share = self.share(plan, groups, skewed=True)
        rows = max(1, batch // plan.dp)
        runs = steps_of(share, rows * (context + steps + 64), ahead=False)
        if not self.dry:
            runs.capture(rows, context + steps + 64)
        balancer = Rebalancer(share.model.dispatched, groups.movers, interval=steps // 4)
        share.model.before_pass = Lockstep(groups.step, share.model.take_part, balancer).enter
        decoding = Decoding(runs, rows, context)
        took: dict[str, list[float]] = {"still": [], "moving": [], "planning": []}
        for _ in range(steps):
            before = balancer.state
            started = time.perf_counter()
            decoding.step()
            seconds = self.slowest(time.perf_counter() - started)
            begun = before.layers_moved == before.layers and balancer.state.layers_moved < balancer.state.layers
            kind = "planning" if begun else "still" if before.layers_moved == before.layers else "moving"
            took[kind].append(seconds)
        decoding.end()
        state = balancer.state
        name = f"rebalance, {plan}, {batch} requests"
        self.note(f"{name}: rebalancings that moved something", state.finished, "", 1, most=False)
        self.note(f"{name}: given up", state.abandoned, "", 0)
        self.note(f"{name}: load of the busiest rank over the mean at last", state.imbalance, "")
        still = took["still"][len(took["still"]) // 10 :]
        usual = float(np.median(still))
        self.note(f"{name}: the usual step, {self.layers} layers", 1e3 * usual, "ms")
        self.note(f"{name}: longest step without moves more than the usual one", 1e3 * (max(still) - usual), "ms")
        if took["moving"]:
            jitter = 100 * (float(np.median(took["moving"])) / usual - 1)
            self.note(f"{name}: steps with moves", len(took["moving"]), "")
            self.note(f"{name}: their median, more than the usual step", jitter, "%", 5.0)
        for kind in ("planning", "moving"):
            if took[kind]:
                stall = float(np.max(took[kind])) - usual
                self.note(f"{name}: longest step while {kind} more than the usual one", 1e3 * stall, "ms", 5.0)


def main() -> None:
    rank, ranks, meet, told = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[5])
    work = json.loads(sys.argv[4])
    own = Rank(rank, ranks, meet, layers=work["layers"], dry=work["dry"])
    for job in work["jobs"]:
        plan = ParallelPlan.parse(job.pop("plan"))
        groups = join_groups(plan, rank, timeout_s=120)
        getattr(own, job.pop("part"))(plan, groups, **job)
        if rank == 0:
            with told.open("a") as file:
                file.write(json.dumps(own.rows) + "\n")
        own.rows = []
    own.meet()
    os._exit(0)  # gloo's threads have been seen to abort a process while it was torn down


if __name__ == "__main__":
    main()
