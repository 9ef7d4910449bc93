"""Rows on their way to the experts of other ranks and home again: alone, by tokens a rank, and in passes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from katydid_engine.fixed_room import MOST_FIXED_ROWS
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.layers.activations import Activations
from katydid_engine.layers.expert_exchange import ExpertExchange
from katydid_engine.layers.steps import finish
from katydid_engine.parallel import ParallelPlan
from katydid_engine.rank_groups import RankGroups
from katydid_engine.rank_slice.absent_ranks import AbsentRanks
from one_rank import Rank
from torch import Tensor

__all__ = ["exchange", "overlap"]

P2P_BYTES_A_US = 393_000.0
CALLS, REPLAYS = 20, 11


def exchange(own: Rank, plan: ParallelPlan, groups: RankGroups, sizes: list[int]) -> None:
    """Rows of as many tokens as a graph holds go in its fixed form, more in the counted one, whose sizes the host
    reads. The floor is a row to each other rank and one back at the links' measured speed."""
    model = own.share(plan, groups).model
    way, config = model.dispatched[0].exchange, model.config
    assert config.moe is not None
    top_k = config.moe.top_k
    generator = torch.Generator().manual_seed(own.rank)
    for tokens in sizes:
        ids = torch.rand(tokens, config.moe.num_experts, generator=generator).topk(top_k).indices.int()
        x = torch.randn(tokens, config.hidden_size, generator=generator).to(model.dtype)
        weights = torch.full((tokens, top_k), 1 / top_k, device=own.device)
        room = model.exchange_rows(tokens) if tokens <= MOST_FIXED_ROWS else None
        way.capacity = room
        received = plan.ep * (room or tokens)
        computed = torch.zeros(received, config.hidden_size, dtype=model.dtype, device=own.device)
        call = _there_and_back(way, x.to(own.device), weights, ids.to(own.device), computed)
        took = own.slowest(_captured_s(own, call) if room is not None and not own.dry else _called_s(own, call))
        form = "counted" if room is None else f"room for {room}"
        bytes_each = way.row_bytes + 8 * top_k + 2 * config.hidden_size
        floor = 1e6 * tokens * (plan.ep - 1) * bytes_each / P2P_BYTES_A_US / 1e6
        own.note(f"exchange, {plan}, {tokens} tokens a rank, {form}: there and back", 1e6 * took, "us", floor=floor)


def _there_and_back(
    way: ExpertExchange, x: Tensor, weights: Tensor, ids: Tensor, computed: Tensor
) -> Callable[[], Tensor]:
    def experts(_rows: Activations, weights: Tensor, _ids: Tensor) -> Tensor:
        return computed[: len(weights)]

    return lambda: finish(way.run(x, weights, ids, experts, lambda: None))


def _captured_s(own: Rank, call: Callable[[], object]) -> float:
    """Of one of many calls in a graph."""
    call()
    own.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    own.meet()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS)]  # type: ignore[no-untyped-call]
    graph.replay()
    for mark in marks:
        graph.replay()
        mark.record()
    own.meet()
    return 1e-3 * float(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))) / CALLS


def _called_s(own: Rank, call: Callable[[], object]) -> float:
    """Of calls one after the other, with the host between them."""
    call()
    own.meet()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    own.meet()
    return (time.perf_counter() - started) / CALLS


def overlap(own: Rank, plan: ParallelPlan, groups: RankGroups, tokens: int) -> None:
    """How much of the time that rows take to their experts and back is seen, with a pass in one part and in two."""
    ids = [[7 + (own.rank + 3 * index) % 400 for index in range(tokens // 8)] for _ in range(8)]
    each = -(-len(ids[0]) // 64)
    runs = [TokenRun(run, 0, list(range(row * each, (row + 1) * each))) for row, run in enumerate(ids)]
    took = {}
    for way, parts in (("alone", 1), ("alone", 2), ("together", 1), ("together", 2)):
        present = groups
        if way == "alone":
            present = replace(groups, experts=AbsentRanks(groups.experts.rank, groups.experts.size))
        model = own.share(plan, present, micro_batches=parts).model
        cache = model.new_kv_cache(8 * each)
        step = partial(model.forward, ForwardBatch.pack(runs, device=own.device), cache)
        took[way, parts] = own.slowest(float(np.median(own.seconds(step, 7))))
        del model, cache, step
    for parts in (1, 2):
        name = f"overlap, {plan}, {tokens} tokens a rank: {parts} micro-batches, {own.layers} layers"
        own.note(name, 1e3 * took["together", parts], "ms")
        own.note(f"{name}, nothing sent", 1e3 * took["alone", parts], "ms")
    sent = took["together", 1] - took["alone", 1]
    seen = 100 * (took["together", 2] - took["alone", 2]) / sent
    own.note(f"overlap, {plan}, {tokens} tokens a rank: of the time for sending, seen with two", seen, "%", 15.0)
