"""One rank of a plan over gloo, started by ``test_plans`` as a process of its own.

Arguments: rank, number of processes, rendezvous file, and a JSON list of jobs ``{folder, plan, prompts, chunk, steps,
output, capacity, micro_batches, halved_from}``. Prompt i is computed by DP group i % dp: its first ``chunk`` tokens,
the rest, then ``steps`` greedy tokens. The first rank of each DP group saves logits and tokens.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from katydid_engine.eplb.rebalancer import Rebalancer
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.lockstep import Lockstep
from katydid_engine.parallel import ParallelPlan
from katydid_engine.rank_groups import join_groups

PAGES = 4


def main() -> None:
    faulthandler.enable()  # an abort in native code says where
    rank, size, rendezvous, jobs = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    for job in jobs:
        run(job, rank)
    dist.barrier()
    sys.stdout.flush()
    os._exit(
        0
    )  # gloo's threads have been seen to abort a process whose results were long written while it was torn down


def arrive(rebalancer: Rebalancer | None) -> None:
    """Experts under way come before the next pass, however slow the host: a few passes are all there are."""
    staged = None if rebalancer is None else rebalancer._staged
    while staged is not None and staged.started and not staged.complete:
        time.sleep(0.001)


def run(job: dict[str, Any], rank: int) -> None:
    plan = ParallelPlan.parse(job["plan"])
    place = plan.place(rank)
    groups = join_groups(plan, rank, timeout_s=60)
    model = load_model(
        Path(job["folder"]),
        plan=plan,
        collectives=groups.tensor,
        experts=groups.experts,
        stage=groups.stage,
        micro_batches=job["micro_batches"],
        halved_from=job["halved_from"],
    )
    for block in model.dispatched:
        block.exchange.capacity = job["capacity"]
    lockstep, rebalancer = None, None
    if groups.step.size > 1:
        if plan.redundant_experts:
            rebalancer = Rebalancer(model.dispatched, groups.movers, interval=3)
        lockstep = Lockstep(groups.step, model.take_part, rebalancer)
        model.before_pass = lockstep.enter
    prompts = job["prompts"][place.dp :: plan.dp]
    cache = model.new_kv_cache(PAGES * max(1, len(prompts)))
    pages = [list(range(PAGES * index, PAGES * (index + 1))) for index in range(len(prompts))]

    def forward(runs: list[TokenRun], num_decodes: int = 0) -> list[torch.Tensor]:
        if not runs:
            assert lockstep is not None
            lockstep.idle()
            arrive(rebalancer)
            return []
        hidden = model.forward(ForwardBatch.pack(runs, num_decodes=num_decodes), cache)
        if lockstep is not None:
            lockstep.meanwhile()
        arrive(rebalancer)
        if not model.has_head:
            return [torch.ones((len(run.token_ids), 3)) for run in runs]
        return list(model.logits(hidden).split([len(run.token_ids) for run in runs]))

    chunk = job["chunk"]
    heads = forward([TokenRun(ids[:chunk], 0, own) for ids, own in zip(prompts, pages, strict=True)])
    tails = forward([TokenRun(ids[chunk:], chunk, own) for ids, own in zip(prompts, pages, strict=True)])
    logits = [torch.cat(parts) for parts in zip(heads, tails, strict=True)]
    tokens = [[int(own[-1].argmax())] for own in logits]
    for step in range(job["steps"] - 1):
        if plan.pp > 1:
            shared = torch.tensor([own[-1] for own in tokens])
            dist.broadcast(shared, 0)
            tokens = [[*own[:-1], int(token)] for own, token in zip(tokens, shared, strict=True)]
        runs = [
            TokenRun([own[-1]], len(ids) + step, held) for ids, own, held in zip(prompts, tokens, pages, strict=True)
        ]
        for own, row in zip(tokens, forward(runs, len(runs)), strict=True):
            own.append(int(row.argmax()))
    if place.tp == 0 and place.pp == 0:
        rebalanced = 0 if rebalancer is None else rebalancer.state.finished
        torch.save({"logits": logits, "tokens": tokens, "rebalanced": rebalanced}, f"{job['output']}-{place.dp}")


if __name__ == "__main__":
    main()
