"""Decode steps as graphs while redundant experts move from rank to rank, and while they do not."""

from __future__ import annotations

import time

import numpy as np
from katydid_engine.eplb.rebalancer import Rebalancer
from katydid_engine.lockstep import Lockstep
from katydid_engine.parallel import ParallelPlan
from katydid_engine.rank_groups import RankGroups
from katydid_engine.rank_slice.steps import Decoding
from one_rank import Rank
from shares import steps_of

__all__ = ["rebalance"]


def rebalance(own: Rank, plan: ParallelPlan, groups: RankGroups, batch: int, context: int, steps: int) -> None:
    """Decodes with routing as uneven as a trained model's; each step is told by what was under way in it."""
    share = own.share(plan, groups, skewed=True)
    rows = max(1, batch // plan.dp)
    runs = steps_of(share, rows * (context + steps + 64), ahead=False)
    if not own.dry:
        runs.capture(rows, context + steps + 64)
    balancer = Rebalancer(share.model.dispatched, groups.movers, interval=steps // 4)
    balancer.connect()
    lockstep = Lockstep(groups.step, share.model.take_part, balancer)
    share.model.before_pass = lockstep.enter
    decoding = Decoding(runs, rows, context)
    kinds: list[str] = []
    seconds: list[float] = []
    for _ in range(steps):
        before = balancer.state
        started = time.perf_counter()
        decoding.step()
        lockstep.meanwhile()
        runs.synchronize()
        seconds.append(time.perf_counter() - started)
        begun = before.layers_moved == before.layers and balancer.state.layers_moved < balancer.state.layers
        kinds.append("planning" if begun else "still" if before.layers_moved == before.layers else "moving")
    decoding.end()
    # Ranks pass together, so a step's kind is the same on all; its time is that of the slowest.
    took: dict[str, list[float]] = {"still": [], "moving": [], "planning": []}
    for kind, slowest in zip(kinds, own.slowest_of(seconds), strict=True):
        took[kind].append(slowest)
    state = balancer.state
    name = f"rebalance, {plan}, {batch} requests"
    own.note(f"{name}: rebalancings that moved something", state.finished, "", 1, most=False)
    own.note(f"{name}: given up", state.abandoned, "", 0)
    own.note(f"{name}: load of the busiest rank over the mean at last", state.imbalance, "")
    still = took["still"][len(took["still"]) // 10 :]
    usual = float(np.median(still))
    own.note(f"{name}: the usual step, {own.layers} layers", 1e3 * usual, "ms")
    own.note(f"{name}: longest step without moves more than the usual one", 1e3 * (max(still) - usual), "ms")
    if took["moving"]:
        jitter = 100 * (float(np.median(took["moving"])) / usual - 1)
        own.note(f"{name}: steps with moves", len(took["moving"]), "")
        own.note(f"{name}: their median, more than the usual step", jitter, "%", 5.0)
    for kind in ("planning", "moving"):
        if took[kind]:
            stall = float(np.max(took[kind])) - usual
            own.note(f"{name}: longest step while {kind} more than the usual one", 1e3 * stall, "ms", 5.0)
