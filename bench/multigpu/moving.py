"""Decode steps as graphs while redundant experts move from rank to rank, and while they do not."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict

import numpy as np
from katydid_engine.eplb.rebalancer import Rebalancer
from katydid_engine.lockstep import Lockstep
from katydid_engine.parallel import ParallelPlan
from katydid_engine.rank_groups import RankGroups
from katydid_engine.rank_slice.steps import Decoding
from one_rank import Rank
from shares import steps_of

__all__ = ["beyond_the_usual", "rebalance"]

# The first steps of a run are not like those that follow.
SETTLING = 0.1
Step = tuple[str, float]
"""What was under way in it, "still", "planning" or "moving", and its seconds."""


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
    took = list(zip(kinds, own.slowest_of(seconds), strict=True))[round(SETTLING * steps) :]
    state, more = balancer.state, beyond_the_usual(took)
    name = f"rebalance, {plan}, {batch} requests"
    own.note(f"{name}: rebalancings that moved something", state.finished, "", 1, most=False)
    own.note(f"{name}: given up", state.abandoned, "", 0)
    own.note(f"{name}: load of the busiest rank over the mean at last", state.imbalance, "")
    usual = float(np.median([step for kind, step in took if kind == "still"]))
    own.note(f"{name}: the usual step, {own.layers} layers", 1e3 * usual, "ms")
    own.note(f"{name}: longest step without moves more than the usual one", 1e3 * max(more["still"]), "ms")
    if more["moving"]:
        jitter = 100 * float(np.median(more["moving"])) / usual
        own.note(f"{name}: steps with moves", len(more["moving"]), "")
        own.note(f"{name}: their median, more than the usual step", jitter, "%", 5.0)
    for kind in ("planning", "moving"):
        if more[kind]:
            own.note(f"{name}: longest step while {kind} more than the usual one", 1e3 * max(more[kind]), "ms", 5.0)


def beyond_the_usual(took: list[Step]) -> dict[str, list[float]]:
    """Seconds by which steps of each kind took longer than the usual ones around them: those without moves are compared
    with the median of their stretch, the others with the mean of the stretches before and behind, for steps become
    shorter as the experts' load evens out."""
    stretches = [(still, list(steps)) for still, steps in itertools.groupby(took, key=lambda step: step[0] == "still")]
    medians = {
        number: float(np.median([seconds for _, seconds in steps]))
        for number, (still, steps) in enumerate(stretches)
        if still
    }
    more = defaultdict(list)
    for number, (_, steps) in enumerate(stretches):
        around = [medians[other] for other in (number - 1, number, number + 1) if other in medians]
        for kind, seconds in steps:
            more[kind].append(seconds - float(np.mean(around)))
    return more
