"""What the latency of the reductions over peers hangs on, read from the compiler's result for sm_90."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Compiling takes longer than all other tests of these kernels.
pytestmark = pytest.mark.soak
# The assembler keeps one word of a quantising kernel on the stack, outside its loops, whatever registers it is given.
WORD = 8


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_peers.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    return {line["case"]: line for line in map(json.loads, run.stdout.splitlines())}


def test_nothing_spills(compiled: dict[str, dict]) -> None:
    assert {case: line["stack_bytes"] for case, line in compiled.items() if line["stack_bytes"] > WORD} == {}
    assert all(line["registers"] <= 128 for line in compiled.values())


def test_rows_are_polled_past_the_caches_sixteen_bytes_at_a_time(compiled: dict[str, dict]) -> None:
    # A row from eight ranks: 4,096 / 2 words over 512 threads are a vector each.
    assert compiled["few"]["opcodes"]["LDG.E.128.STRONG.SYS"] == 8
    assert "MEMBAR.ALL.SYS" not in compiled["few"]["opcodes"]


def test_a_meeting_costs_two_fences_and_one_exchange(compiled: dict[str, dict]) -> None:
    for case, meetings in (("many", 2), ("quantized", 2), ("gather", 2), ("scatter", 1)):
        opcodes = compiled[case]["opcodes"]
        assert opcodes["MEMBAR.ALL.SYS"] == 2 * meetings
        assert opcodes["ATOMG.E.EXCH.STRONG.SYS"] == meetings
        assert opcodes["STG.E.128"] >= 8
