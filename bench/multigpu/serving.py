"""Prompts and decode steps of Hy3's layers behind the engine's runner: each plan, against TP alone."""

from __future__ import annotations

import itertools
import time
from functools import partial

import numpy as np
from katydid_engine.lockstep import Lockstep
from katydid_engine.model_config import ModelConfig
from katydid_engine.parallel import ParallelPlan
from katydid_engine.rank_groups import RankGroups
from katydid_engine.rank_slice.floor import floor_s, step_work
from katydid_engine.rank_slice.steps import Decoding, SliceSteps
from one_rank import CHUNK, Rank
from shares import build_share, cut_hy3, steps_of

__all__ = ["serve"]

# The share of drafts that count as right: synthetic weights predict nothing.
AGREEMENT = 0.85
LONG = 65536
SETTLING, STEPS = 6, 30
TPOT_S, HY3_LAYERS = 0.05, 80
# With eight GPUs, of a prompt of 32,768 tokens, a split residual against a whole one, %.
LEAST_SHORTER = 24.5


def serve(
    own: Rank,
    plan: ParallelPlan,
    groups: RankGroups,
    lengths: list[int],
    batches: list[int],
    context: int,
    *,
    drafts: int = 0,
    peers: bool = True,
    ahead: bool = False,
    chunk: int = CHUNK,
) -> None:
    """``chunk``: tokens of a prompt that are computed at once."""
    config = cut_hy3(own.layers, mtp=drafts > 0, dry=own.dry)
    memory = own.peers(plan, groups, config.hidden_size, chunk) if peers else None
    expert_memory = own.expert_peers(plan, groups, config.hidden_size) if peers else None
    share = build_share(config, plan, groups, own.device, memory, expert_peers=expert_memory)
    own.meet()  # nobody writes into memory that is still being made
    name = f"{plan}" + ("" if peers else " over NCCL") + (f", {drafts} drafts" if drafts else "")
    name += (" ahead" if ahead else "") + (f" in chunks of {chunk}" if chunk != CHUNK else "")
    shares = {batch: batch // plan.dp for batch in batches if batch >= plan.dp}
    tokens = max([*lengths, *(rows * (context + 256) for rows in shares.values())])
    # As in an engine: groups that share experts agree on every pass, and launch none before the last is over unless
    # they are told to plan ahead.
    steps = steps_of(share, tokens, drafts, ahead=plan.dp == 1 or ahead)
    for length in lengths if plan.dp == 1 else []:
        calls = 4 if length < LONG else 1
        took_s = sorted(own.together(partial(steps.prefill, length, chunk)) for _ in range(calls))[(calls - 1) // 2]
        floor_ms = 1e3 * _prompt_floor_s(config, plan, length, chunk)
        own.note(f"serve {length}, {name}: TTFT, {own.layers} layers", 1e3 * took_s, "ms", floor=floor_ms)
        bar = LEAST_SHORTER if plan.sp and own.ranks == 8 and length == 32768 else None
        figure, kind = f"serve {length}, {name}: TTFT lower than with tp{plan.tp}", f"chunks of {chunk}"
        _against_tp(own, figure, plan, kind, length, took_s, bar)
    took: dict[int, float] = {}
    for batch, rows in shares.items():
        if not own.dry and (plan.dp > 1 or not took):
            share.model.before_pass = None
            captured = [rows] if plan.dp > 1 else list(shares.values())
            steps.capture_batches(captured, context + 256, [drafts], AGREEMENT if drafts else None)
        if plan.dp > 1:
            share.model.before_pass = Lockstep(groups.step, share.model.take_part).enter
        took[batch] = own.slowest(_step_s(steps, Decoding(steps, rows, context)))
        least = None if drafts else 1e3 * _step_floor_s(config, plan, rows, context)
        own.note(
            f"serve {batch} x {context}, {name}: a step, {own.layers} layers", 1e3 * took[batch], "ms", floor=least
        )
        figure = f"serve {batch} x {context}, {name}: a step shorter than with tp{own.ranks}"
        _against_tp(own, figure, plan, f"{drafts} drafts", batch, took[batch])
        if drafts:
            tokens_a_step = sum(AGREEMENT**draft for draft in range(1 + drafts))
            figure = f"serve {batch} x {context}, {name}, {AGREEMENT:.0%} of them right: a token of a request"
            own.note(f"{figure}, {own.layers} layers", 1e3 * took[batch] / tokens_a_step, "ms")
    if took and not drafts:
        figure = f"serve, {name}: tokens a second at {1e3 * TPOT_S:.0f} ms a token with {HY3_LAYERS} layers"
        rate = _rate(took, TPOT_S * own.layers / HY3_LAYERS) * own.layers / HY3_LAYERS
        own.note(f"{figure}, up to {max(took)} requests", rate, "tokens/s")
        if plan.dp > 1 and own.of_tp.get(("rate", 0)):
            bar = 1.0 if own.ranks == 8 else None
            own.note(f"{figure}: times tp{own.ranks}'s", rate / own.of_tp["rate", 0], "x", bar, most=False)
        elif plan == ParallelPlan(tp=plan.tp):
            own.of_tp.setdefault(("rate", 0), rate)
    for each in (memory, expert_memory):
        if each is not None:
            each.check()


def _step_s(steps: SliceSteps, decoding: Decoding) -> float:
    """Median of a step, launched while the one before runs or, where none is planned ahead, when it is over."""
    if steps.ahead:
        return float(np.median(decoding.time(STEPS, SETTLING)))
    seconds = []
    for _ in range(SETTLING + STEPS):
        started = time.perf_counter()
        decoding.step()
        steps.synchronize()
        seconds.append(time.perf_counter() - started)
    decoding.end()
    return float(np.median(seconds[SETTLING:]))


def _prompt_floor_s(config: ModelConfig, plan: ParallelPlan, tokens: int, chunk: int) -> float:
    """Of what must be read and computed chunk by chunk, with nothing sent."""
    total = 0.0
    for first in range(0, tokens, chunk):
        last = min(first + chunk, tokens)
        work = step_work(
            config,
            plan,
            dtype="fp8",
            kv="fp8",
            tokens=last - first,
            pairs=(last * (last + 1) - first * (first + 1)) / 2,
            context_tokens=last,
            sampled=int(last == tokens),
        )
        total += floor_s(work)
    return total


def _step_floor_s(config: ModelConfig, plan: ParallelPlan, rows: int, context: int) -> float:
    """Of a step of ``rows`` decodes on every DP group, with nothing sent."""
    read = rows * context
    return floor_s(
        step_work(config, plan, dtype="fp8", kv="fp8", tokens=rows, pairs=read, context_tokens=read, sampled=rows)
    )


def _rate(took: dict[int, float], most_s: float) -> float:
    """Tokens a second of the largest batch whose step takes ``most_s`` at most, between two that were measured."""
    measured = sorted(took.items())
    for (few, few_s), (many, many_s) in itertools.pairwise(measured):
        if few_s <= most_s < many_s:
            return (few + (many - few) * (most_s - few_s) / (many_s - few_s)) / most_s
    within = [batch / seconds for batch, seconds in measured if seconds <= most_s]
    return within[-1] if within else 0.0


def _against_tp(
    own: Rank, figure: str, plan: ParallelPlan, kind: str, size: int, took: float, bar: float | None = None
) -> None:
    """The first plan of a kind is plain TP; the others are compared with it."""
    if (kind, size) in own.of_tp:
        own.note(figure, 100 * (1 - took / own.of_tp[kind, size]), "%", bar, most=False)
    elif plan == ParallelPlan(tp=plan.tp):
        own.of_tp[kind, size] = took
