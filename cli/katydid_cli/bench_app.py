"""`katydid bench`: load on a gateway; and what one rank of a plan would do, alone on one GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from katydid_cli.load.choices import Arrivals, Workload

__all__ = ["bench_app"]

bench_app = typer.Typer()

Address = Annotated[str, typer.Option(help="gRPC address of the gateway.")]
ApiKey = Annotated[str | None, typer.Option(envvar="KATYDID_API_KEY", help="API key, if the gateway asks for one.")]


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    address: Address = "127.0.0.1:8001",
    api_key: ApiKey = None,
    model: Annotated[str, typer.Option(help="Model name; empty when the gateway serves one alone.")] = "",
    workload: Annotated[Workload, typer.Option(help="What the prompts have in common.")] = Workload.SHARED_PREFIX,
    arrivals: Annotated[Arrivals, typer.Option(help="How requests are spread in time.")] = Arrivals.POISSON,
    rate: Annotated[float, typer.Option(help="Arrivals a second: requests, or conversations of multi-turn.")] = 1.0,
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 32,
    input_tokens: Annotated[int, typer.Option(help="Prompt tokens; of multi-turn: added by each turn.")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Output tokens.")] = 64,
    shared_tokens: Annotated[int, typer.Option(min=0, help="Of shared-prefix: tokens of the system prompt.")] = 384,
    groups: Annotated[int, typer.Option(help="Of shared-prefix: number of system prompts.")] = 4,
    turns: Annotated[int, typer.Option(help="Of multi-turn: turns of a conversation.")] = 4,
    think_s: Annotated[float, typer.Option(min=0, help="Of multi-turn: pause before the next turn.")] = 1.0,
    replay: Annotated[Path | None, typer.Option(help="Of replay: trace in Mooncake's format.")] = None,
    speed: Annotated[float, typer.Option(help="Of replay: 2 takes half the time.")] = 1.0,
    scale: Annotated[float, typer.Option(help="Of replay: factor on all lengths.")] = 1.0,
    max_input_tokens: Annotated[int | None, typer.Option(min=1, help="Of replay: longest prompt.")] = None,
    stop_at_eos: Annotated[bool, typer.Option(help="Let answers end early; by default all have full length.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for an answer.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Same seed, same workload.")] = 0,
    ttft_target_s: Annotated[float, typer.Option(help="Target of the time to first token.")] = 4.0,
    tpot_target_s: Annotated[float, typer.Option(help="Target of the time per output token.")] = 0.05,
    output: Annotated[Path | None, typer.Option(help="Write the report and every request to this JSON file.")] = None,
) -> None:
    """Load a gateway in an open loop, and report TTFT, TPOT, ITL and goodput."""
    if context.invoked_subcommand is not None:
        return
    arguments = {name: value for name, value in locals().items() if name != "context"}
    from katydid_cli.load.bench import BenchOptions
    from katydid_cli.load.bench import bench as run_bench

    report = run_bench(BenchOptions(**arguments))
    raise typer.Exit(0 if report.completed else 1)


def _register(name: str, what: str) -> None:
    """`bench <name>` hands its words to the engine's own entry point: the command line does not depend on torch."""

    @bench_app.command(
        name,
        help=f"{what} All its options: katydid bench {name} --help.",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def measure(context: typer.Context) -> None:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "katydid_engine.rank_slice", name, *context.args])


_register("slice", "Time one rank of a plan alone: prompts and decode steps, by phase, beside their floor.")
_register("workload", "Replay agents' prompts on one rank of a plan: how many a second meet their targets.")
