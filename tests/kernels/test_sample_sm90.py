"""What the sampler's speed hangs on, read from the compiler's result for sm_90."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Half a minute of compiling, most of it one kernel.
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_sample.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_hardly_anything_spills(compiled: list[dict]) -> None:
    """The few words allowed are the choice's: scalars, and paths that few rows take."""
    assert {line["case"] for line in compiled} == {"all", "logprobs", "verify", "advance"}
    assert [line for line in compiled if line["stack_bytes"] > 128 * (line["kernel"] == "choose_kernel")] == []


def test_two_scans_fit_an_sm_and_their_loads_are_wide(compiled: list[dict]) -> None:
    scans = {line["case"]: line for line in compiled if line["kernel"] == "scan_kernel"}
    assert max(line["registers"] for line in scans.values()) <= 128
    assert scans["all"]["opcodes"]["LDG.E.128"] == 8  # 16 logits a thread, of the first tile and of the next
    assert scans["all"]["opcodes"]["LDG.E.64"] >= 8  # and their counts
