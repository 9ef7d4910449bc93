"""Measures a slice: prompts by length, decode steps by batch and context; each with its floor, phases and traffic."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from katydid_kernels.stem_select.budget import kept_blocks

from katydid_engine.attention_plan import stem_rule
from katydid_engine.planning.measured import Measured
from katydid_engine.rank_slice.build import RankSlice
from katydid_engine.rank_slice.floor import Work, floor_s, step_work
from katydid_engine.rank_slice.phases import PhaseTimes, phase_times
from katydid_engine.rank_slice.steps import Decoding, SliceSteps
from katydid_engine.rank_slice.timeline import record_timeline
from katydid_engine.sparse_prefill import SparsePrefill

__all__ = ["Figure", "measure_capture", "measure_prompt", "measure_step", "memory_figures", "prefix", "step_traffic"]

_PROFILED_STEPS = 4
_SKIPPED = 5


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured time.

    Attributes:
        seconds: median of what was repeated.
        floor: of the same work, seconds, and by phase.
        phases: on a GPU, of one prompt or of a step.
        gained: tokens that a decode step brought, of all sequences.
        traffic: by collective: calls, bytes that this rank sends, and the seconds that links would take for them.
    """

    name: str
    seconds: float
    repeats: int
    floor: float
    floor_phases: dict[str, float]
    phases: PhaseTimes | None
    traffic: dict[str, dict[str, float]]
    gained: float | None = None

    @property
    def links_s(self) -> float:
        return sum(carried["modelled_s"] for carried in self.traffic.values())

    def row(self) -> dict[str, Any]:
        """Of a results file."""
        row: dict[str, Any] = {
            "figure": self.name,
            "value": self.seconds,
            "unit": "s",
            "floor": self.floor,
            "of_floor": self.floor / self.seconds,
            "repeats": self.repeats,
            "floor_phases": self.floor_phases,
            "traffic": self.traffic,
            "links_modelled_s": self.links_s,
        }
        if self.gained is not None:
            row["tokens_per_s"] = self.gained / self.seconds
        if self.phases is not None:
            row["phases"] = self.phases.seconds
            row["launches"] = self.phases.launches
            row["others"] = list(self.phases.others[:8])
        return row


def measure_prompt(
    steps: SliceSteps,
    tokens: int,
    chunk: int,
    links: Measured,
    *,
    sparse: SparsePrefill | None,
    repeats: int,
    phases: bool,
) -> Figure:
    """A prompt from nothing to its first token. Two chunks before it compile and are not counted.

    Args:
        sparse: how the model computes it sparsely; None for a dense prompt.
    """

    def once() -> float:
        return steps.prefill(tokens, chunk, sparse=sparse is not None)

    steps.prefill(min(tokens, 2 * chunk), chunk, sparse=sparse is not None)
    _clear_traffic(steps.slice)
    seconds = [once()]
    traffic = _traffic_of(steps.slice, links)
    seconds += [once() for _ in range(repeats - 1)]
    options = steps.slice.options
    work = step_work(
        options.config,
        options.plan,
        dtype=options.dtype,
        kv=options.kv,
        tokens=tokens,
        pairs=tokens * (tokens + 1) / 2 * _kept_share(tokens, options.config.num_layers, sparse),
        context_tokens=tokens,
        sampled=1,
    )
    how = f"prefill of {tokens} tokens in chunks of {min(chunk, tokens)}" + _told(tokens, sparse)
    if options.mtp:
        how += ", and by a draft layer"
    return _figure(steps.slice, how, seconds, work, traffic, _phases(once, 1) if phases else None)


def step_traffic(steps: SliceSteps, batch: int, context: int, links: Measured) -> dict[str, dict[str, float]]:
    """What is sent in a step; to be asked before steps are captured, as graphs call no collective."""
    decoding = Decoding(steps, batch, context)
    decoding.step()
    _clear_traffic(steps.slice)
    decoding.step()
    traffic = _traffic_of(steps.slice, links)
    decoding.end()
    return traffic


def measure_step(
    steps: SliceSteps,
    batch: int,
    context: int,
    traffic: dict[str, dict[str, float]],
    *,
    repeats: int,
    phases: bool,
) -> Figure:
    """A decode step of ``batch`` sequences that have ``context`` tokens behind them."""
    Decoding(steps, batch, context).time(2, 2)
    decoding = Decoding(steps, batch, context)
    decoding.run(_SKIPPED)
    before = decoding.tokens
    seconds = decoding.time(repeats, skip=0)
    gained = (decoding.tokens - before) / (repeats + 1)
    options = steps.slice.options
    work = step_work(
        options.config,
        options.plan,
        dtype=options.dtype,
        kv=options.kv,
        tokens=batch * (1 + steps.drafts),
        pairs=batch * (1 + steps.drafts) * context,
        context_tokens=batch * context,
        sampled=batch * (1 + steps.drafts),
    )
    found = None
    if phases:
        decoding = Decoding(steps, batch, context)
        decoding.run(2)
        found = _phases(lambda: decoding.run(_PROFILED_STEPS), _PROFILED_STEPS)
        decoding.end()
    what = f"decode of {batch} at {context}" + (f", {steps.drafts} drafts" if steps.drafts else "")
    return replace(_figure(steps.slice, what, seconds, work, traffic, found), gained=gained)


def memory_figures(rank_slice: RankSlice) -> list[dict[str, Any]]:
    """Bytes on the device: of all that is allocated, and at most since the process began."""
    if rank_slice.model.device.type != "cuda":
        return []
    device = rank_slice.model.device
    return [
        {"figure": f"{prefix(rank_slice)}: memory, {what}", "value": value / 1e9, "unit": "GB"}
        for what, value in (
            ("weights and pages", torch.cuda.memory_allocated(device)),
            ("most", torch.cuda.max_memory_allocated(device)),
        )
    ]


def measure_capture(steps: SliceSteps, sequences: int) -> dict[str, Any]:
    """Seconds until all graphs are captured of an engine with so many sequences of the longest, which chooses among
    all numbers of drafts up to the slice's; how many, and bytes."""
    device = steps.slice.model.device
    # As in an engine, collections do not look at what imports left.
    gc.collect()
    gc.freeze()
    steps.synchronize()
    free, began = torch.cuda.mem_get_info(device)[0], time.perf_counter()
    graphs = steps.capture(
        sequences, steps.slice.options.config.max_positions, chunks=True, depths=range(steps.drafts + 1)
    )
    steps.synchronize()
    seconds = time.perf_counter() - began
    drafts = f" with 0 to {steps.drafts} drafts" if steps.drafts else ""
    return {
        "figure": f"{prefix(steps.slice)}: all graphs of {sequences} sequences{drafts}",
        "value": seconds,
        "unit": "s",
        "graphs": graphs,
        "memory_gb": (free - torch.cuda.mem_get_info(device)[0]) / 1e9,
    }


def _clear_traffic(rank_slice: RankSlice) -> None:
    for group in rank_slice.groups:
        group.traffic.clear()


def _traffic_of(rank_slice: RankSlice, links: Measured) -> dict[str, dict[str, float]]:
    """Since it was cleared, with the time it would take on the links between GPUs of one host."""
    carried: dict[str, dict[str, float]] = {}
    for group, whose in zip(rank_slice.groups, ("tp", "experts"), strict=False):
        for name, traffic in group.traffic.items():
            if group.size > 1:
                seconds = traffic.calls * links["nvlink_s"] + traffic.sent_bytes / links["nvlink_bytes_per_s"]
                carried[f"{whose} {name}"] = {
                    "calls": traffic.calls,
                    "sent_bytes": traffic.sent_bytes,
                    "modelled_s": seconds,
                }
    return carried


def _kept_share(tokens: int, layers: int, sparse: SparsePrefill | None) -> float:
    """Of a prompt's pairs of blocks, mean over layers."""
    if sparse is None:
        return 1.0
    dense = min(layers, sparse.dense_layers)
    return (dense + (layers - dense) * _kept(tokens, sparse)) / layers


def _kept(tokens: int, sparse: SparsePrefill) -> float:
    """Of a prompt's pairs of blocks, in a layer that is computed sparsely."""
    kept = kept_blocks(stem_rule(sparse), tokens)
    return sum(kept) / (len(kept) * (len(kept) + 1) / 2)


def _told(tokens: int, sparse: SparsePrefill | None) -> str:
    """How a prompt is computed sparsely, as far as it is not as the option has it by default."""
    if sparse is None:
        return ""
    rule = "" if sparse.rule == "share" else f" by the {sparse.rule} rule"
    default = SparsePrefill()
    others = {"dense layers": sparse.dense_layers, "blocks of tail": sparse.tail_blocks}
    usual = {"dense layers": default.dense_layers, "blocks of tail": default.tail_blocks}
    more = "".join(f", {count} {what}" for what, count in others.items() if count != usual[what])
    share = sparse.budget if sparse.rule == "share" else _kept(tokens, sparse)
    return f", {share:.0%} of its blocks{rule}{more}"


def _phases(call: Callable[[], object], passes: int) -> PhaseTimes | None:
    spans = record_timeline(call)
    if not spans:
        return None
    found = phase_times(spans)
    return PhaseTimes(
        {name: seconds / passes for name, seconds in found.seconds.items()},
        {name: round(count / passes) for name, count in found.launches.items()},
        found.others,
    )


def _figure(
    rank_slice: RankSlice,
    what: str,
    seconds: list[float],
    work: list[Work],
    traffic: dict[str, dict[str, float]],
    phases: PhaseTimes | None,
) -> Figure:
    bounds: dict[str, float] = {}
    for part in work:
        bounds[part.phase] = bounds.get(part.phase, 0.0) + floor_s([part])
    name = f"{prefix(rank_slice)}: {what}"
    return Figure(name, statistics.median(seconds), len(seconds), floor_s(work), bounds, phases, traffic)


def prefix(rank_slice: RankSlice) -> str:
    """What every figure's name begins with."""
    options = rank_slice.options
    name = f"{options.plan} rank {options.rank}, {options.dtype}, {options.kv} KV"
    return f"{name}, skewed routing" if options.skewed else name
