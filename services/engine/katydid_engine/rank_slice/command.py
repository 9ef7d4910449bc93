"""``slice``: builds one rank of a plan alone and measures it; prints a table, and writes a results file."""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from katydid_runtime.errors import SettingsError

from katydid_engine.draft_depth import MAX_DRAFTS
from katydid_engine.model_config import ModelConfig, read_model_config
from katydid_engine.parallel import ParallelPlan
from katydid_engine.planning.known_models import KNOWN_MODELS
from katydid_engine.planning.measured import measured
from katydid_engine.rank_slice.build import DTYPES, RankSlice, SliceOptions, build_slice
from katydid_engine.rank_slice.last_positions import measure_last_positions
from katydid_engine.rank_slice.lengths import parse_lengths
from katydid_engine.rank_slice.loop import measure_loop
from katydid_engine.rank_slice.measure import (
    Figure,
    measure_capture,
    measure_prompt,
    measure_step,
    memory_figures,
    step_traffic,
)
from katydid_engine.rank_slice.report import report_lines
from katydid_engine.rank_slice.steps import SliceSteps
from katydid_engine.request import pages_for
from katydid_engine.sparse_prefill import SparsePrefill

__all__ = ["SliceBench", "add_build_arguments", "add_slice_arguments", "options_of", "origin", "run_slice"]

_LINKS = "h200"
# Room for what a measurement generates behind a context.
_MORE_TOKENS = 512
_LOOP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class SliceBench:
    """What is measured.

    Attributes:
        prompts, sparse_prompts: tokens of each.
        sparse: how the latter are computed.
        chunk: tokens of a prompt that a step computes.
        batches, contexts: of each decode step, one context a batch.
        drafts: numbers of them that such steps make and verify, one after the other.
        graphs: whether decode steps are captured; on a GPU alone.
        agreement: share of drafts that count as right in captured steps.
        last_chunk: tokens of a prompt that ends near the last position; 0 for none.
        loops: sequences that the scheduler has decode, step by step and ahead.
        captured: sequences of an engine whose graphs are all captured; 0 for none.
    """

    prompts: Sequence[int]
    sparse_prompts: Sequence[int]
    sparse: SparsePrefill
    chunk: int
    batches: Sequence[int]
    contexts: Sequence[int]
    drafts: Sequence[int]
    repeats: int
    phases: bool
    graphs: bool
    agreement: float
    last_chunk: int
    loops: Sequence[int]
    captured: int

    @property
    def tokens(self) -> int:
        """Room that the pages must have."""
        steps = (
            batch * 64 * pages_for(context + _MORE_TOKENS)
            for batch, context in zip(self.batches, self.contexts, strict=True)
        )
        loops = (batch * _LOOP_TOKENS for batch in self.loops)
        return max([*self.prompts, *self.sparse_prompts, *steps, *loops])


def add_build_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of what is built."""
    parser.add_argument("--model", default="hy3", help="hy3, or a model folder, of which config.json alone is read")
    parser.add_argument("--plan", default="tp8", help="how the model is cut: tp8 or tp8,sp,ep8 or dp8ep8 ...")
    parser.add_argument("--rank", type=int, default=0, help="which rank of the plan")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp8", help="of the weights")
    parser.add_argument("--kv", choices=("fp8", "bf16"), default="fp8", help="of the pages; bf16 is fp32 on a CPU")
    parser.add_argument("--routing", choices=("uniform", "skewed"), default="uniform", help="skewed: as hy3-tiny's")
    parser.add_argument("--micro-batches", type=int, default=1, help="parts of a batch where ranks wait for each other")
    parser.add_argument(
        "--emulate-links",
        action="store_true",
        help="what is sent beside a step takes the time of NVLink, by emulated copies",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, help="write the figures to this file")


def add_slice_arguments(parser: argparse.ArgumentParser) -> None:
    add_build_arguments(parser)
    parser.add_argument("--prefill", default="8K,32K,128K", help="prompts, tokens; empty for none")
    parser.add_argument("--sparse-prefill", default="", help="prompts that are computed sparsely, tokens")
    parser.add_argument("--sparse-budget", type=float, default=0.25, help="share of blocks that these keep")
    parser.add_argument(
        "--sparse-rule", choices=("share", "paper", "released"), default="share", help="that share, or as Stem has it"
    )
    parser.add_argument("--chunk", default="16K", help="tokens of a prompt in one step")
    parser.add_argument("--batch", default="1,16,64", help="sequences of decode steps; empty for none")
    parser.add_argument("--context", default="8K,4K,4K", help="tokens behind them: one for all, or one a batch")
    parser.add_argument("--drafts", default="0", help="tokens that the draft layer adds to a decode step: 1, or 0,1,2")
    parser.add_argument("--agreement", type=float, default=0.7, help="share of drafts that count as right")
    parser.add_argument("--last-chunk", default="", help="tokens of a prompt that ends near the last position")
    parser.add_argument("--loop", default="", help="sequences that the scheduler has decode, step by step and ahead")
    parser.add_argument("--capture", default="", help="sequences of an engine all of whose graphs are captured")
    parser.add_argument("--repeats", type=int, default=20, help="decode steps that are timed; prompts: a tenth")
    parser.add_argument("--no-phases", action="store_true", help="do not profile where the time goes")
    parser.add_argument("--no-graphs", action="store_true", help="decode op by op")


def run_slice(arguments: argparse.Namespace) -> dict[str, Any]:
    """Raises SettingsError for what cannot be built or measured, before anything is."""
    drafts = _drafts(arguments)
    options = options_of(arguments, drafts=max(drafts), most_tokens=_chunk(arguments))
    bench = _bench(arguments, options, drafts)
    started = time.perf_counter()
    rank_slice = build_slice(options)
    rank_slice.model.use_sparse_prefill(bench.sparse)
    room = options.config.max_positions if bench.last_chunk else 0
    steps = SliceSteps(rank_slice, max(room, bench.tokens), drafts=max(drafts))
    print(f"built in {time.perf_counter() - started:.1f} s", flush=True)
    record: dict[str, Any] = {**origin(rank_slice), "rows": []}
    for figure in _figures(steps, bench):
        record["rows"].append(figure.row())
        print("\n".join(report_lines(figure)), flush=True)
        _write(arguments.json, record)
    for row in itertools.chain(_rows(steps, bench), memory_figures(rank_slice)):
        record["rows"].append(row)
        print(f"{row['figure']}: {row['value']:.4g} {row['unit']}", flush=True)
    _write(arguments.json, record)
    return record


def options_of(arguments: argparse.Namespace, *, drafts: int = 0, most_tokens: int) -> SliceOptions:
    """Raises SettingsError for what cannot be built, ModelFolderError for a folder that is no model."""
    plan, name = ParallelPlan.parse(arguments.plan), arguments.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.device == "auto" and name == "cpu" and arguments.model in KNOWN_MODELS:
        # A rank of it would take tens of gigabytes, and a step minutes.
        raise SettingsError(
            f"torch sees no GPU, and {arguments.model} is made for one: --model FOLDER names a small model, "
            "--device cpu tries all the same",
            field="device",
            value=name,
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device is cuda, but torch sees no GPU", field="device", value=name, allowed="cpu")
    return SliceOptions(
        _config(arguments.model),
        plan,
        torch.device(name),
        rank=arguments.rank,
        dtype=arguments.dtype,
        kv=arguments.kv,
        skewed=arguments.routing == "skewed",
        mtp=drafts > 0,
        micro_batches=arguments.micro_batches,
        most_tokens=most_tokens,
        links=measured(_LINKS)["nvlink_bytes_per_s"] if arguments.emulate_links else None,
    )


def _bench(arguments: argparse.Namespace, options: SliceOptions, drafts: Sequence[int]) -> SliceBench:
    batches = parse_lengths("batch", arguments.batch)
    contexts = parse_lengths("context", arguments.context) if batches else []
    if len(contexts) == 1:
        contexts *= len(batches)
    if len(contexts) != len(batches):
        raise SettingsError(
            f"context {arguments.context!r}: expected one length, or one for each of {len(batches)} batches",
            field="context",
            value=arguments.context,
        )
    prompts, sparse_prompts = (parse_lengths(name, getattr(arguments, name)) for name in ("prefill", "sparse_prefill"))
    longest, most = max([*prompts, *sparse_prompts, *contexts], default=0), options.config.max_positions
    if longest > most:
        raise SettingsError(
            f"{longest} tokens: the model has {most} positions", field="prefill", value=longest, allowed=f"<= {most}"
        )
    last_chunk = next(iter(parse_lengths("last_chunk", arguments.last_chunk)), 0)
    if last_chunk > most // 2:
        raise SettingsError(
            f"last_chunk {last_chunk}: the model has {most} positions",
            field="last_chunk",
            value=last_chunk,
            allowed=f"<= {most // 2}",
        )
    try:
        sparse = SparsePrefill(budget=arguments.sparse_budget, rule=arguments.sparse_rule, min_tokens=1)
    except ValueError as error:
        raise SettingsError(str(error), field="sparse_budget", value=arguments.sparse_budget) from error
    on_gpu = options.device.type == "cuda"
    return SliceBench(
        prompts,
        sparse_prompts,
        sparse,
        _chunk(arguments),
        batches,
        contexts,
        drafts,
        arguments.repeats,
        phases=on_gpu and not arguments.no_phases,
        graphs=on_gpu and not arguments.no_graphs,
        agreement=arguments.agreement,
        last_chunk=last_chunk,
        loops=parse_lengths("loop", arguments.loop),
        captured=next(iter(parse_lengths("capture", arguments.capture)), 0),
    )


def _drafts(arguments: argparse.Namespace) -> list[int]:
    try:
        drafts = [int(part) for part in str(arguments.drafts).split(",")]
    except ValueError:
        drafts = []
    if not drafts or not all(0 <= depth <= MAX_DRAFTS for depth in drafts):
        allowed = f"0 to {MAX_DRAFTS}, or several of them: 0,1"
        raise SettingsError(
            f"drafts {arguments.drafts!r}: expected {allowed}", field="drafts", value=arguments.drafts, allowed=allowed
        )
    return drafts


def _chunk(arguments: argparse.Namespace) -> int:
    chunks = parse_lengths("chunk", arguments.chunk)
    if len(chunks) != 1:
        raise SettingsError(f"chunk {arguments.chunk!r}: expected one length", field="chunk", value=arguments.chunk)
    return chunks[0]


def origin(rank_slice: RankSlice) -> dict[str, Any]:
    """Of a results file: on what and with what it was measured."""
    device = rank_slice.model.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    options = rank_slice.options
    return {
        "gpu": gpu,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "plan": str(options.plan),
        "routing": "skewed" if options.skewed else "uniform",
    }


def _figures(steps: SliceSteps, bench: SliceBench) -> Iterator[Figure]:
    links = measured(_LINKS)
    repeats = max(1, bench.repeats // 10)
    for sparse, prompts in ((None, bench.prompts), (bench.sparse, bench.sparse_prompts)):
        for tokens in prompts:
            yield measure_prompt(steps, tokens, bench.chunk, links, sparse=sparse, repeats=repeats, phases=bench.phases)
    if not bench.batches:
        return
    cases = list(zip(bench.batches, bench.contexts, strict=True))
    traffic: dict[tuple[int, int, int], dict[str, dict[str, float]]] = {}
    for steps.drafts in bench.drafts:
        traffic |= {(steps.drafts, *case): step_traffic(steps, *case, links) for case in cases}
    if bench.graphs:
        longest, agreement = max(bench.contexts) + _MORE_TOKENS, bench.agreement if max(bench.drafts) else None
        steps.capture_batches(bench.batches, longest, bench.drafts, agreement)
    for steps.drafts in bench.drafts:
        for case in cases:
            sent = traffic[steps.drafts, *case]
            yield measure_step(steps, *case, sent, repeats=bench.repeats, phases=bench.phases)


def _rows(steps: SliceSteps, bench: SliceBench) -> Iterator[dict[str, Any]]:
    """What has no floor."""
    if bench.last_chunk:
        steps.drafts = 0
        if bench.graphs:
            steps.capture_batches([1], steps.slice.options.config.max_positions, [0])
        last = steps.slice.options.config.max_positions
        in_front = min(last, max(2 * bench.last_chunk, last // 16))
        for most, sparse in ((last, False), (last, True), (in_front, False)):
            yield measure_last_positions(steps, bench.last_chunk, most=most, sparse=sparse)
    for steps.drafts, batch in itertools.product(bench.drafts, bench.loops):
        if bench.graphs:
            agreement = bench.agreement if steps.drafts else None
            steps.capture_batches([batch], _LOOP_TOKENS, [steps.drafts], agreement)
        yield from measure_loop(steps, batch, count=3 * bench.repeats)
    if bench.captured and bench.graphs:
        steps.drafts = max(bench.drafts)
        yield measure_capture(steps, bench.captured)


def _config(model: str) -> ModelConfig:
    return KNOWN_MODELS[model] if model in KNOWN_MODELS else read_model_config(Path(model))


def _write(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
