"""``workload``: agents on a slice. How many requests a second meet their targets, and what a long prompt costs others.

Minutes of agents are replayed in simulated time, by step times measured on the slice (or read from a file), through the
engine's scheduler; ``--real-s`` replays the beginning of the same on the slice itself, to be held against it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from katydid_runtime.block_hash import BLOCK_TOKENS
from katydid_runtime.errors import SettingsError

from katydid_engine.block_pool import BlockPool
from katydid_engine.chunk_steps import ALONE_CHUNKS, CHUNKS, SPARSE_CHUNKS
from katydid_engine.parallel import ParallelPlan
from katydid_engine.planning.known_models import KNOWN_MODELS
from katydid_engine.planning.measured import measured
from katydid_engine.planning.phases import Phases
from katydid_engine.rank_slice.agents import Agents, AgentTraffic, Session, Turn
from katydid_engine.rank_slice.build import build_slice
from katydid_engine.rank_slice.command import add_build_arguments, options_of, origin
from katydid_engine.rank_slice.lengths import parse_lengths
from katydid_engine.rank_slice.on_slice import OnSlice, measure_steps
from katydid_engine.rank_slice.replay import Answer, Clock, Clocks, Executor, Replay, Simulated, WallClock
from katydid_engine.rank_slice.replay_arena import ReplayArena
from katydid_engine.rank_slice.step_times import MeasuredSteps, StepTimes, fit_step_times
from katydid_engine.rank_slice.steps import SliceSteps
from katydid_engine.scheduler import Scheduler, SchedulerConfig
from katydid_engine.sparse_prefill import SparsePrefill
from katydid_engine.token_budget import TokenBudget

__all__ = ["add_workload_arguments", "run_workload", "streams"]

_DECODES = (*((batch, context) for batch in (1, 4, 16, 32, 64) for context in (1024, 4096)), (16, 16384))
_CHUNKS = (
    (64, 1024),
    (256, 0),
    (512, 0),
    (1024, 0),
    (2048, 0),
    (4096, 0),
    (8192, 0),
    (256, 8192),
    (2048, 65536),
    (8192, 65536),
    (512, 131072),
    (1024, 32768),
)
_SPARSE_CHUNKS = ((512, 32768), (512, 98304), (2048, 32768), (2048, 98304), (8192, 32768), (8192, 98304))
# On a host, where a reference takes seconds for those.
_FEW_DECODES = ((1, 64), (1, 256), (4, 64))
_FEW_CHUNKS = ((64, 0), (256, 0), (64, 256))
_STEADY = 20
_MORE_TOKENS = 128
_LINK_ROWS = (1, 8, 64, 256, 1024, 4096, 16384)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    add_build_arguments(parser)
    parser.add_argument("--rates", default="0.5,1,1.5,2,2.5,3", help="requests a second, to be simulated")
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="of simulated time; its first quarter is not judged"
    )
    parser.add_argument("--step-times", type=Path, help="take step times from this file; nothing is built then")
    parser.add_argument("--pages", type=int, default=60_000, help="KV pages of the simulated scheduler")
    parser.add_argument("--max-batch-tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--ttft-s", type=float, default=4.0, help="target of the time to first token")
    parser.add_argument("--tpot-s", type=float, default=0.05, help="target of the time per output token")
    parser.add_argument("--step-s", type=float, default=0.048, help="what a step with a prompt may take beside decodes")
    parser.add_argument("--sparse-prefill", help="compute long prompts so, as the engine's option has it: stem:...")
    parser.add_argument("--in-order", action="store_true", help="prompts come as they arrived, for no target of TTFT")
    parser.add_argument("--link-model", action="store_true", help="add transfers' modelled time to simulated steps")
    parser.add_argument("--real-s", type=float, default=0.0, help="replay so many seconds on the slice too")
    parser.add_argument("--real-after-minutes", type=float, default=5.0, help="of simulated time before them")
    parser.add_argument("--real-rate", type=float, default=1.0, help="requests a second of that")
    parser.add_argument("--streams", type=int, default=0, help="streams that decode while a long prompt comes")
    parser.add_argument("--stream-context", default="4K", help="tokens behind each")
    parser.add_argument("--stream-prompt", default="128K", help="the long prompt")
    parser.add_argument("--seed", type=int, default=0)


def run_workload(arguments: argparse.Namespace) -> dict[str, Any]:
    """Raises SettingsError for what is asked wrongly."""
    record: dict[str, Any] = {"rows": []}
    steps, sparse = None, _sparse(arguments)
    if arguments.step_times is None or arguments.real_s or arguments.streams:
        rank_slice = build_slice(options_of(arguments, most_tokens=arguments.max_batch_tokens))
        steps = SliceSteps(rank_slice, arguments.pages * BLOCK_TOKENS, arena=arguments.real_s > 0)
        record |= origin(rank_slice)
        if sparse is not None:
            rank_slice.model.use_sparse_prefill(sparse)
        if rank_slice.model.device.type == "cuda":
            steps.capture(64, rank_slice.options.config.max_positions, chunks=True)
    if arguments.step_times is not None:
        known = _read_step_times(arguments.step_times)
    else:
        assert steps is not None
        on_gpu = steps.slice.model.device.type == "cuda"
        decodes, chunks = (_DECODES, _CHUNKS) if on_gpu else (_FEW_DECODES, _FEW_CHUNKS)
        room, longest = steps.pages * BLOCK_TOKENS, steps.slice.options.config.max_positions
        known = measure_steps(
            steps,
            [(n, past) for n, past in decodes if past + _MORE_TOKENS <= longest and n * (past + _MORE_TOKENS) <= room],
            [(n, past) for n, past in chunks if n + past + _MORE_TOKENS <= min(room, longest)],
            _SPARSE_CHUNKS if on_gpu and sparse is not None else (),
        )
    record["step_times"] = {
        kind: [[*key, seconds] for key, seconds in points.items()] for kind, points in asdict(known).items()
    }
    _write(arguments.json, record)
    times = fit_step_times(known, sparse)
    if steps is not None and arguments.streams:
        executor, vocabulary = OnSlice(steps), min(steps.slice.token_ids(1000)) + 1000
        record["rows"].append(streams(arguments, executor, WallClock(), steps.pages, vocabulary))
        executor.close()
        _write(arguments.json, record)
    if steps is not None and arguments.real_s:
        record["rows"] += _real(arguments, steps, times)
        _write(arguments.json, record)
    sending = _sending(arguments) if arguments.link_model else ()
    for rate in _rates(arguments.rates):
        record["rows"].append(_simulated(arguments, replace(times, sending=sending), rate))
        _write(arguments.json, record)
    return record


def _sparse(arguments: argparse.Namespace) -> SparsePrefill | None:
    if not arguments.sparse_prefill:
        return None
    try:
        return SparsePrefill.parse(arguments.sparse_prefill)
    except ValueError as error:
        raise SettingsError(str(error), field="sparse_prefill", value=arguments.sparse_prefill) from error


def _simulated(arguments: argparse.Namespace, times: StepTimes, rate: float) -> dict[str, Any]:
    until = 60 * arguments.minutes
    traffic = _traffic(rate)
    clock = _simulation(arguments, times, traffic)
    scheduler = _scheduler(arguments, BlockPool(arguments.pages), clock)
    answers = _replayed(arguments, scheduler, clock, clock, traffic, until)
    links = ", with the link model" if times.sending else ""
    links += f", {arguments.sparse_prefill}" if arguments.sparse_prefill else ""
    links += ", in order of arrival" if arguments.in_order else ""
    return _attained(arguments, f"simulated, {rate:g} requests a second offered{links}", answers, until / 4, until)


def _real(arguments: argparse.Namespace, steps: SliceSteps, times: StepTimes) -> list[dict[str, Any]]:
    """The same seconds on the slice and in simulated time, behind the same simulated minutes. Pages forget what nobody
    holds, so that hits come from an arena."""
    since, rate = 60 * arguments.real_after_minutes, arguments.real_rate
    until = since + arguments.real_s
    traffic = replace(_traffic(rate), vocabulary=min(steps.slice.token_ids(1000)) + 1000)

    def replay() -> tuple[Replay, Clocks]:
        simulation = _simulation(arguments, times, traffic)
        clocks, pool = Clocks(simulation), BlockPool(steps.pages)
        scheduler, sparse = _scheduler(arguments, pool, clocks), bool(arguments.sparse_prefill)
        arena = ReplayArena(steps.object_bytes)
        found = Replay(scheduler, simulation, clocks, sparse=sparse, arena=arena, forget=pool.flush)
        found.run(Agents(traffic, arguments.seed).sessions(until), since)
        return found, clocks

    (real, clocks), (like, _) = replay(), replay()
    executor = OnSlice(steps)
    real.go_on_with(executor)
    clocks.present = WallClock(since)
    what = (
        f"hits from an arena, {rate:g} requests a second offered, {arguments.real_s:g} s behind {since:g} s simulated"
    )
    answers = real.run((), until)
    executor.close()
    return [
        _attained(arguments, f"on the slice, {what}", answers, since, until),
        _attained(arguments, f"simulated, {what}", like.run((), until), since, until),
    ]


def streams(
    arguments: argparse.Namespace, executor: Executor, clock: Clock, pages: int, vocabulary: int
) -> dict[str, Any]:
    """Streams that decode; behind them a long prompt. Its TTFT, and the gaps between the others' tokens from when it
    came."""
    (context,), (prompt,) = (
        parse_lengths(name, getattr(arguments, name)) for name in ("stream_context", "stream_prompt")
    )
    budget = _budget(arguments)
    scheduler = _scheduler(arguments, BlockPool(pages), clock, budget)

    def session(number: int, tokens: int, output: int) -> Session:
        # Drawn here, where no stream waits for it.
        ids = array("I", random.Random(number).choices(range(vocabulary), k=tokens - 1))
        return Session(number, 0.0, [Turn(tokens, output, 0.0)], ids, vocabulary)

    replay, length = Replay(scheduler, executor, clock, sparse=bool(arguments.sparse_prefill)), 1 << 20
    before, long = (session(arguments.streams + part, prompt // part, 2) for part in (4, 1))

    budget.target_s = None  # until they all decode
    others = [replay.ask(session(index, context, length)) for index in range(arguments.streams)]
    replay.until(lambda: all(len(answer.times) > _STEADY for answer in others))
    budget.target_s = arguments.step_s

    # Steps' times are known then, as to an engine that has been at work.
    first = replay.ask(before)
    replay.until(lambda: first.done)
    began = clock()
    answer = replay.ask(long)
    replay.until(lambda: answer.done)
    replay.abort()
    gaps = sorted(
        later - earlier for other in others for earlier, later in itertools.pairwise(other.times) if later > began
    )
    how = f", {arguments.sparse_prefill}" if arguments.sparse_prefill else ""
    row = {
        "figure": f"p99 between tokens of {len(others)} streams at {context} while {prompt} tokens are prefilled{how}",
        "value": gaps[int(0.99 * (len(gaps) - 1))],
        "unit": "s",
        "median": statistics.median(gaps),
        "largest": gaps[-1],
        "prompt_ttft_s": answer.ttft,
    }
    print(f"{row['figure']}: {1e3 * gaps[int(0.99 * (len(gaps) - 1))]:.1f} ms, {row}", flush=True)
    return row


def _replayed(
    arguments: argparse.Namespace,
    scheduler: Scheduler,
    executor: Executor,
    clock: Clock,
    traffic: AgentTraffic,
    until: float,
) -> list[Answer]:
    replay = Replay(scheduler, executor, clock, sparse=bool(arguments.sparse_prefill))
    return replay.run(Agents(traffic, arguments.seed).sessions(until), until)


def _simulation(arguments: argparse.Namespace, times: StepTimes, traffic: AgentTraffic) -> Simulated:
    """Raises SettingsError: prompts may be sparse, and the times tell nothing of such."""
    sparse = _sparse(arguments)
    if sparse is not None and not times.sparse_rows:
        raise SettingsError(
            f"sparse_prefill: {arguments.step_times} has no times of sparse prompts",
            field="sparse_prefill",
            value=arguments.sparse_prefill,
        )
    return Simulated(times, traffic.vocabulary)


def _attained(
    arguments: argparse.Namespace, name: str, answers: Sequence[Answer], since: float, until: float
) -> dict[str, Any]:
    """Of the requests asked since then that are done, or are late already."""
    judged = [answer for answer in answers if answer.asked_at >= since]
    good = [a for a in judged if a.done and a.ttft < arguments.ttft_s and a.tpot < arguments.tpot_s]
    late = [a for a in judged if not a.done and a.late(until, arguments.ttft_s)]
    done = [answer for answer in judged if answer.done]
    if not done:
        raise SettingsError(f"{name}: no request ended in that time", field="minutes", value=until / 60)
    prompts = sum(answer.prompt_tokens for answer in done)
    ttft, tpot = _quantiles([answer.ttft for answer in done]), _quantiles([answer.tpot for answer in done])
    row = {
        "figure": f"{name}: TTFT < {arguments.ttft_s:g} s and TPOT < {1e3 * arguments.tpot_s:g} ms",
        "value": len(good) / (len(done) + len(late)),
        "unit": "of requests",
        "requests": len(done),
        "requests_per_s": len(done) / (until - since),
        "prompt_mean": prompts / len(done),
        "output_mean": statistics.mean(answer.output_tokens for answer in done),
        "cached_share": sum(answer.cached_tokens for answer in done) / prompts,
        "ttft_s": ttft,
        "tpot_s": tpot,
    }
    print(
        f"{row['figure']}: {row['value']:.1%} of {len(done)} requests ({row['requests_per_s']:.2f}/s, prompts "
        f"{row['prompt_mean']:,.0f}, answers {row['output_mean']:.0f}, {row['cached_share']:.0%} cached); "
        f"TTFT {_shown(ttft)} s, TPOT {_shown(tpot)} s",
        flush=True,
    )
    return row


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{share}": ordered[int(share / 100 * (len(ordered) - 1))] for share in (50, 95, 99)}


def _shown(quantiles: dict[str, float]) -> str:
    return " / ".join(f"{value:.3f}" for value in quantiles.values())


def _traffic(rate: float) -> AgentTraffic:
    turns = AgentTraffic(1.0).turns
    return AgentTraffic(rate / turns)


def _budget(arguments: argparse.Namespace) -> TokenBudget:
    dense, sparse, alone = (
        [size for size in sizes if size <= arguments.max_batch_tokens]
        for sizes in (CHUNKS, SPARSE_CHUNKS, ALONE_CHUNKS)
    )
    return TokenBudget(arguments.step_s, BLOCK_TOKENS, dense, sparse, alone_sizes=alone)


def _scheduler(
    arguments: argparse.Namespace, pool: BlockPool, clock: Clock, budget: TokenBudget | None = None
) -> Scheduler:
    pages = pool.num_pages
    config = SchedulerConfig(
        max_model_tokens=min(262_144, pages * BLOCK_TOKENS),
        max_batch_tokens=arguments.max_batch_tokens,
        max_sequences=64,
        watermark_pages=pages // 100,
        sparse=_sparse(arguments),
    )
    ttft_s = None if arguments.in_order else arguments.ttft_s
    return Scheduler(config, pool, clock, budget=budget or _budget(arguments), ttft_target_s=ttft_s)


def _sending(arguments: argparse.Namespace) -> Sequence[tuple[int, float]]:
    """The link model's seconds of a step by its rows."""
    phases = Phases(KNOWN_MODELS["hy3"], ParallelPlan.parse(arguments.plan), measured("h200"))
    return [(rows, phases.prefill(rows).exposed) for rows in _LINK_ROWS]


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        rates = [0.0]
    if any(not 0 < rate < 1e6 for rate in rates):
        raise SettingsError(f"rates {text!r}: expected numbers above zero, by commas", field="rates", value=text)
    return rates


def _read_step_times(path: Path) -> MeasuredSteps:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["step_times"]
        kinds = ("decodes", "chunks", *({"sparse"} & set(told)))
        points = {kind: {(a, b): seconds for a, b, seconds in told[kind]} for kind in kinds}
    except OSError as error:
        message = f"step_times: {path} cannot be read: {error.strerror}"
        raise SettingsError(message, field="step_times", value=str(path)) from error
    except (ValueError, KeyError, TypeError) as error:
        message = f"step_times: {path} has none: expected a file of `katydid bench workload --json`"
        raise SettingsError(message, field="step_times", value=str(path)) from error
    return MeasuredSteps(**points)


def _write(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
