"""Streams keep their pace beside a prompt of 128K tokens on hosts of any speed, in simulated time: each prepared size
takes as long as it did on an H200 (80 layers, tp8), where no line goes through all of them."""

from __future__ import annotations

import argparse
import random

import pytest
from katydid_engine.plan import StepPlan
from katydid_engine.rank_slice.replay import Simulated
from katydid_engine.rank_slice.workload import add_workload_arguments, streams

STEM = ["--sparse-prefill", "stem:budget=0.25,dense_layers=2,min_tokens=32768"]
# By size: seconds beside 32 streams and with no pairs, and of a pair.
DENSE = {
    256: (0.0196, 6.7e-10),
    384: (0.0174, 6.7e-10),
    512: (0.0190, 6.3e-10),
    768: (0.0222, 5.7e-10),
    1024: (0.0246, 5.4e-10),
    1536: (0.0325, 3.9e-10),
    2048: (0.0398, 3.9e-10),
}
SPARSE = {
    256: (0.0200, 5.5e-10),
    512: (0.0233, 5.0e-10),
    1024: (0.0285, 5.2e-10),
    1536: (0.0331, 5.0e-10),
    2048: (0.0385, 3.5e-10),
}
DECODES_S = 0.0095


class Measured:
    """``launch_s`` is what the host takes for a step op by op; the device takes ``slower`` times as long as it did."""

    def __init__(self, launch_s: float, slower: float) -> None:
        self.launch_s, self.slower, self.chance = launch_s, slower, random.Random(5)

    def of(self, plan: StepPlan) -> float:
        tokens, prompts = plan.num_prefill_tokens, len(plan.runs) - plan.num_decodes
        sizes, pairs = (SPARSE, plan.sparse_pairs) if plan.sparse else (DENSE, float(plan.num_prefill_pairs))
        size = next((size for size in sizes if size >= tokens), None)
        least_s = 0.0
        if not tokens:
            seconds = DECODES_S
        elif prompts == 1 and size is not None:
            first_s, pair_s = sizes[size]
            seconds = first_s + pair_s * pairs - (0.0 if plan.num_decodes else DECODES_S)
        else:
            seconds, least_s = 0.0165 + 1.18e-5 * tokens + (2.6e-10 if plan.sparse else 3.67e-10) * pairs, self.launch_s
        return max(least_s, self.slower * seconds) * self.chance.gauss(1.0, 0.004)


@pytest.mark.parametrize("launch_s", [0.06, 0.19])
@pytest.mark.parametrize(
    ("options", "slower", "ttft_s"), [([], 1.0, 10.6), ([], 0.95, 9.6), (STEM, 1.0, 4.0), (STEM, 0.95, 3.8)]
)
def test_streams_wait_no_longer_than_asked(launch_s: float, options: list[str], slower: float, ttft_s: float) -> None:
    parser = argparse.ArgumentParser()
    add_workload_arguments(parser)
    arguments = parser.parse_args(["--plan", "tp8", "--streams", "32", "--step-s", "0.048", *options])
    clock = Simulated(Measured(launch_s, slower), 100_000)
    row = streams(arguments, clock, clock, 20_000, 100_000)
    assert row["value"] < 0.0485
    assert row["prompt_ttft_s"] < ttft_s
