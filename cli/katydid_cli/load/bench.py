"""The `katydid bench` command: build the workload, run it, print and save the report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from katydid_client import AsyncKatydid
from katydid_runtime.errors import SettingsError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from katydid_cli.load.choices import Arrivals, Workload
from katydid_cli.load.replay import read_trace
from katydid_cli.load.report import Report, Targets, summarize
from katydid_cli.load.runner import Outcome, run_workload
from katydid_cli.load.workload import (
    Session,
    TokenSource,
    constant_arrivals,
    multi_turn,
    poisson_arrivals,
    random_prompts,
    shared_prefix,
)
from katydid_cli.more_than_zero import check_more_than_0
from katydid_cli.writable import check_writable_file

__all__ = ["BenchOptions", "bench", "make_sessions"]

_MORE_THAN_0 = (
    *("rate", "requests", "input_tokens", "output_tokens", "groups", "turns", "speed", "scale"),
    *("timeout_s", "ttft_target_s", "tpot_target_s"),
)

_POOL_TEXT = (
    "the quick brown fox jumps over a lazy dog while seven small engines answer many long questions about code and "
    "tests return values import modules define functions raise errors read files write logs count tokens measure time "
    "cache pages route requests stream text check sums plan steps"
)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the command was asked for; lengths in tokens."""

    address: str = "127.0.0.1:8001"
    api_key: str | None = None
    model: str = ""
    workload: Workload = Workload.SHARED_PREFIX
    arrivals: Arrivals = Arrivals.POISSON
    rate: float = 1.0
    requests: int = 32
    input_tokens: int = 512
    output_tokens: int = 64
    shared_tokens: int = 384
    groups: int = 4
    turns: int = 4
    think_s: float = 1.0
    replay: Path | None = None
    speed: float = 1.0
    scale: float = 1.0
    max_input_tokens: int | None = None
    stop_at_eos: bool = False
    timeout_s: float = 600.0
    seed: int = 0
    ttft_target_s: float = 4.0
    tpot_target_s: float = 0.05
    output: Path | None = None


def make_sessions(options: BenchOptions) -> list[Session]:
    """The workload asked for. Raises SettingsError for numbers that make none."""
    for name in _MORE_THAN_0:
        check_more_than_0("--" + name.replace("_", "-"), getattr(options, name))
    lengths = (options.requests, options.input_tokens, options.output_tokens)
    arrivals = (
        poisson_arrivals(options.rate, options.seed)
        if options.arrivals is Arrivals.POISSON
        else constant_arrivals(options.rate)
    )
    match options.workload:
        case Workload.RANDOM:
            return random_prompts(arrivals, *lengths)
        case Workload.SHARED_PREFIX:
            return shared_prefix(arrivals, *lengths, shared_tokens=options.shared_tokens, groups=options.groups)
        case Workload.MULTI_TURN:
            return multi_turn(arrivals, *lengths, turns=options.turns, think_s=options.think_s)
        case Workload.REPLAY:
            if options.replay is None:
                raise SettingsError("--workload=replay needs --replay FILE", field="replay")
            return read_trace(
                options.replay,
                limit=options.requests,
                speed=options.speed,
                scale=options.scale,
                max_input_tokens=options.max_input_tokens,
            )


def bench(options: BenchOptions, console: Console | None = None) -> Report:
    """Run the load, print the report, and write it to `options.output` as JSON, one record a request included."""
    console = console or Console(highlight=False)
    sessions = make_sessions(options)
    if options.output is not None:
        check_writable_file("--output", options.output)
    targets = Targets(options.ttft_target_s, options.tpot_target_s)
    outcomes = asyncio.run(_run(options, sessions, console))
    report = summarize(outcomes, targets)
    for line in report.lines(targets):
        console.print(line, soft_wrap=True)
    console.print(report.table())
    if options.output is not None:
        _save(options, outcomes, report)
    return report


async def _run(options: BenchOptions, sessions: Sequence[Session], console: Console) -> list[Outcome]:
    total = sum(len(session.turns) for session in sessions)
    async with AsyncKatydid(
        options.address, api_key=options.api_key, timeout=options.timeout_s, max_retries=0
    ) as client:
        pool = (await client.tokenize(_POOL_TEXT, model=options.model)).ids
        source = TokenSource(sorted(set(pool)), options.seed)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("requests", total=total)
            return await run_workload(
                client,
                sessions,
                source,
                model=options.model,
                ignore_eos=not options.stop_at_eos,
                on_outcome=lambda _: progress.advance(task),
            )


def _save(options: BenchOptions, outcomes: Sequence[Outcome], report: Report) -> None:
    assert options.output is not None
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(options).items()
        if name != "api_key"
    }
    records = [asdict(outcome) for outcome in outcomes]
    text = json.dumps({"settings": settings, "report": report.as_json(), "requests": records}, indent=1)
    try:
        options.output.write_text(text + "\n")
    except OSError as error:
        raise SettingsError(f"cannot write {options.output}: {error.strerror}", value=str(options.output)) from error
