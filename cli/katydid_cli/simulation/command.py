"""`katydid simulate`: one trace, several policies, a table and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from katydid_runtime.errors import SettingsError

from katydid_cli.more_than_zero import check_more_than_0
from katydid_cli.simulation.engine_model import EngineSpeeds
from katydid_cli.simulation.policies import POLICIES
from katydid_cli.simulation.replay import Outcome, replay
from katydid_cli.simulation.trace import Arrival, agent_traffic, read_trace
from katydid_cli.writable import check_writable_file

__all__ = ["SimulateOptions", "simulate"]


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What to replay, over what, and how often."""

    trace: Path | None
    requests: int
    rate: float
    rate_scale: float
    engines: int
    speeds: EngineSpeeds
    policies: tuple[str, ...]
    ttft_slo_s: float
    seed: int
    output: Path | None


def simulate(options: SimulateOptions) -> None:
    """Prints a row a policy.

    Raises SettingsError for a policy that does not exist, a trace that cannot be read, numbers that nothing can be
    replayed with, and an output that cannot be written.
    """
    unknown = next((policy for policy in options.policies if policy not in POLICIES), None)
    if unknown is not None:
        allowed = ", ".join(POLICIES)
        raise SettingsError(f"there is no policy {unknown!r}", field="policy", value=unknown, allowed=allowed)
    _check_numbers(options)
    if options.output is not None:
        check_writable_file("--output", options.output)
    arrivals = _arrivals(options)
    tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    length_s = max(arrivals[-1].at - arrivals[0].at, 1e-9)
    typer.echo(
        f"{len(arrivals)} requests of {tokens / len(arrivals):,.0f} prompt tokens in the mean over {length_s:,.0f} s; "
        f"{options.engines} engines of {options.speeds.prefill_tokens_per_s:,.0f} prompt tokens/s"
    )
    typer.echo(
        f"{'policy':<14}{'mean TTFT':>12}{'p50':>12}{'p99':>12}{'in SLO':>9}{'hits':>8}{'busy':>7}{'fullest':>9}"
    )
    outcomes = []
    for policy in options.policies:
        outcome = replay(policy, arrivals, options.engines, options.speeds, ttft_slo_s=options.ttft_slo_s)
        outcomes.append(outcome)
        typer.echo(_row(outcome))
    if options.output is not None:
        options.output.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


def _check_numbers(options: SimulateOptions) -> None:
    numbers = {
        "--rate": options.rate,
        "--rate-scale": options.rate_scale,
        "--prefill-speed": options.speeds.prefill_tokens_per_s,
        "--step-ms": options.speeds.step_s * 1e3,
        "--ttft-slo-s": options.ttft_slo_s,
    }
    for option, value in numbers.items():
        check_more_than_0(option, value)


def _arrivals(options: SimulateOptions) -> Sequence[Arrival]:
    if options.trace is not None:
        return read_trace(options.trace, rate_scale=options.rate_scale, limit=options.requests or None)
    return agent_traffic(requests=options.requests or 4000, sessions_per_s=options.rate, seed=options.seed)


def _row(outcome: Outcome) -> str:
    return (
        f"{outcome.policy:<14}{outcome.mean_ttft_s:>10.3f} s{outcome.p50_ttft_s:>10.3f} s{outcome.p99_ttft_s:>10.3f} s"
        f"{outcome.within_slo:>9.1%}{outcome.hit_rate:>8.1%}{outcome.busy:>7.1%}{outcome.most_over_mean:>9.2f}"
    )
