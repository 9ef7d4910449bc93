"""Autoscaling rules on a day of agents, simulated: who meets the targets, and for how many GPU hours.

python bench/scaling.py [--hours 24] [--rule NAME ...]      writes bench/results/scaling.json
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from katydid_cli.simulation.autoscalers import RULES
from katydid_cli.simulation.day import day_of_agents
from katydid_cli.simulation.elastic import ElasticOptions, ElasticOutcome, replay_elastic
from katydid_cli.simulation.engine_model import EngineSpeeds

RESULTS = Path(__file__).parent / "results" / "scaling.json"
GRAIN = 32
HEAD = (
    f"{'rule':<20}{'TTFT':>8}{'TPOT':>8}{'both':>8}{'p50':>8}{'p99':>9}{'GPU h':>8}{'mean':>7}{'most':>6}{'changes':>9}"
)
# An engine of eight GPUs: 24K prompt tokens a second, a decode step of 12 ms and 0.3 ms a request,
# 768 prompt tokens a step (so that no step takes longer than 50 ms), 2M tokens of KV.
SPEEDS = EngineSpeeds(24_000 / GRAIN, 0.012, 0.0003, 768 // GRAIN, 2 * 2**20 // GRAIN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--peak", type=float, default=0.5, help="sessions begun a second at the peak")
    parser.add_argument("--rule", action="append", choices=list(RULES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    elastic = ElasticOptions(SPEEDS)
    known = json.loads(options.output.read_text())["rules"] if options.output.exists() and options.rule else []
    rows = {row["rule"]: row for row in known}
    print(HEAD)
    for name in options.rule or RULES:
        began = time.perf_counter()
        day = day_of_agents(peak_sessions_per_s=options.peak, seed=12, grain=GRAIN, hours=options.hours)
        outcome = replay_elastic(name, RULES[name](elastic.start_s), day, elastic)
        rows[name] = asdict(outcome)
        print(_row(outcome), f"   ({time.perf_counter() - began:.0f} s)", flush=True)
        settings = {"hours": options.hours, "peak_sessions_per_s": options.peak, "grain": GRAIN, "seed": 12}
        content = {"settings": settings | asdict(elastic), "rules": [rows[rule] for rule in RULES if rule in rows]}
        options.output.write_text(json.dumps(content, indent=1) + "\n")


def _row(outcome: ElasticOutcome) -> str:
    return (
        f"{outcome.rule:<20}{outcome.within_ttft:>8.2%}{outcome.within_tpot:>8.2%}{outcome.within_both:>8.2%}"
        f"{outcome.p50_ttft_s:>6.2f} s{outcome.p99_ttft_s:>7.1f} s{outcome.gpu_hours:>8.0f}{outcome.engines:>7.2f}"
        f"{outcome.most_engines:>6}{outcome.changes:>9}"
    )


if __name__ == "__main__":
    main()
