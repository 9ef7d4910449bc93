"""The commands and their options; what they do is imported when they are called, so that `katydid --help` is quick."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from katydid_cli.bench_app import bench_app
from katydid_cli.cache_app import cache_app
from katydid_cli.gateway_app import gateway_app
from katydid_cli.model_folder import default_cache_dir

__all__ = ["app"]

app = typer.Typer(
    name="katydid",
    help="Serve very large MoE language models: a gateway, engines and a KV-cache service.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
models_app = typer.Typer(help="Models a laptop can get: list, prepare, verify.")
app.add_typer(models_app, name="models")
app.add_typer(cache_app, name="cache")
app.add_typer(bench_app, name="bench")
app.add_typer(gateway_app, name="gateway")

CacheDir = Annotated[Path, typer.Option(envvar="KATYDID_CACHE_DIR", help="Where prepared models live.")]
Address = Annotated[str, typer.Option(help="gRPC address of the gateway.")]
ApiKey = Annotated[str | None, typer.Option(envvar="KATYDID_API_KEY", help="API key, if the gateway asks for one.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"katydid {version('katydid')}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class QuantizationScheme(StrEnum):
    W4A8 = "w4a8"
    W8A8 = "w8a8"
    W8A8C8 = "w8a8c8"


class Clip(StrEnum):
    MSE = "mse"
    NONE = "none"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@app.command()
def up(
    model: Annotated[str | None, typer.Option(help="Model folder or name; by default the embedded model.")] = None,
    engines: Annotated[int, typer.Option(help="Number of engines.")] = 1,
    device: Annotated[Device, typer.Option(help="Where engines compute; auto: cuda where there is one.")] = Device.AUTO,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the OpenAI HTTP API.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway's gRPC service.")] = 8001,
    kv_memory_mb: Annotated[
        int | None, typer.Option(min=1, help="Host memory for KV blocks, MiB; unset: 1024, or what a policy file says.")
    ] = None,
    kv_disk_dir: Annotated[Path | None, typer.Option(help="Folder of the KV disk tier; unset: no disk tier.")] = None,
    kv_disk_mb: Annotated[
        int | None, typer.Option(min=1, help="Disk space for KV blocks, MiB; unset: 8192, or what a policy file says.")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the cache service's /metrics, engines' behind it; unset: none."),
    ] = None,
    trace_file: Annotated[Path | None, typer.Option(help="Write the spans of all processes to this file.")] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe log line shown.")] = LogLevel.WARNING,
    drain_timeout_s: Annotated[
        float, typer.Option(min=0, help="Longest wait for running requests at shutdown.")
    ] = 10.0,
    start_timeout_s: Annotated[float, typer.Option(help="Longest wait for a service to become ready.")] = 600.0,
    engine_option: Annotated[
        list[str] | None, typer.Option(help="Passed to every engine, such as --engine-option=--dtype=float32.")
    ] = None,
    gateway_option: Annotated[list[str] | None, typer.Option(help="Passed to the gateway.")] = None,
    kvcache_option: Annotated[
        list[str] | None,
        typer.Option(help="Passed to the KV-cache service, such as --kvcache-option=--policy-file=policy.yaml."),
    ] = None,
    cache_dir: CacheDir = default_cache_dir(),
) -> None:
    """Run everything on this machine: a KV-cache service, engines and a gateway. Ctrl-C stops it."""
    from katydid_cli.fleet.plan import FleetOptions, find_device
    from katydid_cli.fleet.up import up as run_fleet
    from katydid_cli.model_folder import resolve_model

    folder = resolve_model(model, cache_dir)
    options = FleetOptions(
        model=folder,
        model_name=folder.name,
        engines=engines,
        device=find_device(device),
        port=port,
        grpc_port=grpc_port,
        kv_memory_mb=kv_memory_mb,
        kv_disk_dir=kv_disk_dir,
        kv_disk_mb=kv_disk_mb,
        metrics_port=metrics_port,
        trace_file=trace_file,
        drain_timeout_s=drain_timeout_s,
        engine_arguments=tuple(engine_option or ()),
        gateway_arguments=tuple(gateway_option or ()),
        kvcache_arguments=tuple(kvcache_option or ()),
    )
    raise typer.Exit(run_fleet(options, log_level=log_level.value, start_timeout_s=start_timeout_s))


def _register_service(service: str, what: str) -> None:
    """`serve-<service>` hands its words to the service's own entry point: its settings are its options."""

    @app.command(
        f"serve-{service}",
        help=f"Run {what}. All its settings are options: katydid serve-{service} --help.",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def serve(context: typer.Context) -> None:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", f"katydid_{service}", *context.args])


_register_service("gateway", "the gateway: OpenAI HTTP and gRPC in front of engines")
_register_service("engine", "an engine: token ids in, token ids out")
_register_service("kvcache", "the KV-cache service: blocks in memory and on disk")


@app.command()
def chat(
    address: Address = "127.0.0.1:8001",
    api_key: ApiKey = None,
    model: Annotated[str, typer.Option(help="Model name; empty when the gateway serves one alone.")] = "",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; by default the model's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
) -> None:
    """Talk to a model; each answer is followed by its TTFT, TPOT and cached tokens."""
    from katydid_cli.chat import ChatOptions
    from katydid_cli.chat import chat as run_chat

    raise typer.Exit(run_chat(ChatOptions(address, api_key, model, system, max_tokens, temperature, seed)))


@app.command()
def trace(
    files: Annotated[list[Path], typer.Argument(help="Trace files, or folders of them.")],
    trace_id: Annotated[
        str | None,
        typer.Option("--id", help="Trace id (its beginning is enough) or request id; by default the latest."),
    ] = None,
) -> None:
    """Print a request's spans across all processes, and what its time to first token went into."""
    from katydid_cli.tracing.view import trace as show_trace

    show_trace(files, trace_id)


@app.command("eval")
def evaluate(
    model: Annotated[str | None, typer.Option(help="Model folder or name; by default the embedded model.")] = None,
    data: Annotated[Path, typer.Option(help="Folder of the held-out documents.")] = default_cache_dir()
    / "hy3-tiny-data",
    configuration: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME, --model=FOLDER of another copy, engine options ('bf16 --dtype=bfloat16'); several side by side."
        ),
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="bits, recall, choice, tools or mtp; by default all.")] = None,
    extent: Annotated[str, typer.Option(help="quick, standard, full or exhaustive.")] = "quick",
    in_process: Annotated[
        bool, typer.Option(help="Run the engine's model in this process, without a service.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write all figures to this JSON file.")] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Put the table into quantization-report.html of the folders that have one.")
    ] = False,
    cache_dir: CacheDir = default_cache_dir(),
) -> None:
    """Measure a model's quality in one or many engine configurations, side by side."""
    from katydid_cli.evaluation.command import Configuration, EvaluationOptions, parse_configuration
    from katydid_cli.evaluation.command import evaluate as run_evaluation
    from katydid_cli.evaluation.suite import TASKS
    from katydid_cli.model_folder import resolve_model

    options = EvaluationOptions(
        model=resolve_model(model, cache_dir),
        data=data,
        configurations=tuple(map(parse_configuration, configuration or ())) or (Configuration("default"),),
        tasks=tuple(task or TASKS),
        extent=extent,
        in_process=in_process,
        output=output,
        report=report,
    )
    raise typer.Exit(run_evaluation(options))


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Model folder or name.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    scheme: Annotated[
        QuantizationScheme,
        typer.Option(help="w4a8: int4 in groups of 128; w8a8: e4m3, a scale a matrix; w8a8c8: and scales of K and V."),
    ] = QuantizationScheme.W4A8,
    clip: Annotated[
        Clip, typer.Option(help="Of w4a8's scales: mse, the least squared error; none, the largest weight.")
    ] = Clip.MSE,
    device: Annotated[Device, typer.Option(help="Where to compute; auto: cuda where there is one.")] = Device.AUTO,
    shard_mib: Annotated[int, typer.Option(min=1, help="Largest file, MiB.")] = 4096,
    recipe: Annotated[
        Path | None, typer.Option(help="YAML: calibration data, GPTQ, smoothing, distillation; unset: weights alone.")
    ] = None,
    cache_dir: CacheDir = default_cache_dir(),
) -> None:
    """Write a quantised copy of a model; an interrupted run goes on where it was."""
    from katydid_cli.fleet.plan import find_device
    from katydid_cli.model_folder import resolve_model
    from katydid_cli.quantize import QuantizeOptions
    from katydid_cli.quantize import quantize as run

    folder = resolve_model(model, cache_dir)
    run(QuantizeOptions(folder, out, scheme.value, clip.value, find_device(device), shard_mib, recipe))


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="hy3, hy3-tiny, or a model folder.")] = "hy3",
    pool: Annotated[
        Path | None, typer.Option(help="YAML: gpu, gpus {min, max}, memory, network, gpus_per_host.")
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens of a request, as 32768 or 256K.")] = "32K",
    slo: Annotated[str, typer.Option(help="Seconds to the first token, and a token.")] = "ttft=4,tpot=0.05",
    memory_cap: Annotated[str | None, typer.Option(help="Memory of a GPU that may be used, as 96GB.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a record.")] = False,
) -> None:
    """Predict memory, TTFT and TPOT of each plan for a pool of GPUs, and choose one for each phase."""
    from katydid_cli.plan import PlanOptions
    from katydid_cli.plan import plan as run

    run(PlanOptions(model, pool, context, slo, memory_cap, as_json))


@app.command()
def simulate(
    trace: Annotated[Path | None, typer.Option(help="Trace in Mooncake's JSONL format; unset: agents at work.")] = None,
    requests: Annotated[int, typer.Option(min=0, help="Requests at most; 0: all of a trace, 4000 of agents.")] = 0,
    rate: Annotated[float, typer.Option(help="Of agents: sessions begun a second.")] = 0.85,
    rate_scale: Annotated[float, typer.Option(help="Of a trace: so many times as fast.")] = 1.0,
    engines: Annotated[int, typer.Option(min=1, help="Number of engines.")] = 8,
    prefill_speed: Annotated[float, typer.Option(help="Prompt tokens a second of one engine.")] = 60_000.0,
    step_ms: Annotated[float, typer.Option(help="Time of a decode step of one request.")] = 8.0,
    step_ms_per_request: Annotated[float, typer.Option(min=0, help="What each further request adds to it.")] = 0.1,
    budget_tokens: Annotated[int, typer.Option(min=64, help="Prompt tokens a step takes at most.")] = 8192,
    cache_tokens: Annotated[int, typer.Option(min=64, help="Tokens one engine's prefix cache holds.")] = 2_000_000,
    policy: Annotated[list[str] | None, typer.Option(help="Policies to compare; by default all.")] = None,
    ttft_slo_s: Annotated[float, typer.Option(help="Bound of the time to first token.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Of the agents.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Replay traffic over simulated engines, with Katydid's routing and others': no GPU, no model."""
    from katydid_cli.simulation.command import SimulateOptions
    from katydid_cli.simulation.command import simulate as run
    from katydid_cli.simulation.engine_model import EngineSpeeds
    from katydid_cli.simulation.policies import POLICIES

    speeds = EngineSpeeds(prefill_speed, step_ms / 1e3, step_ms_per_request / 1e3, budget_tokens, cache_tokens)
    policies = tuple(policy or POLICIES)
    run(SimulateOptions(trace, requests, rate, rate_scale, engines, speeds, policies, ttft_slo_s, seed, output))


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@models_app.command("list")
def list_models(cache_dir: CacheDir = default_cache_dir()) -> None:
    """Show the models that can be prepared, and what is there already."""
    from katydid_cli.models_commands import show_models

    show_models(cache_dir)


@models_app.command("prepare")
def prepare_model(
    name: Annotated[str, typer.Argument(help="Name from `katydid models list`.")],
    cache_dir: CacheDir = default_cache_dir(),
) -> None:
    """Make a model's folder in the cache directory, and print its path."""
    from katydid_cli.models_commands import prepare_model as run

    run(name, cache_dir)


@models_app.command("verify")
def verify_model(
    name: Annotated[str, typer.Argument(help="Name from `katydid models list`.")],
    cache_dir: CacheDir = default_cache_dir(),
) -> None:
    """Check a prepared model's files, and that it answers a question rightly."""
    from katydid_cli.models_commands import verify_model as run

    run(name, cache_dir)
