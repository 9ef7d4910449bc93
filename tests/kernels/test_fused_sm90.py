"""What the speed of qkv_post and kv_pack hangs on, read from the compiler's result for sm_90."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_fused.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    return {line["case"]: line for line in map(json.loads, run.stdout.splitlines())}


def test_nothing_spills_and_many_programs_fit_an_sm(compiled: dict[str, dict]) -> None:
    assert {case: line["STACK"] for case, line in compiled.items() if line["STACK"]} == {}
    assert compiled["qkv_post"]["REG"] <= 96
    assert compiled["qkv_post means"]["REG"] == compiled["qkv_post hadamard"]["REG"]


def test_a_warp_stores_v_along_tokens(compiled: dict[str, dict]) -> None:
    """Along head_dim instead, every byte goes out in a sector of its own: three times the kernel's time."""
    assert "[32, 1]" in compiled["qkv_post"]["e4m3_stores"]


def test_loads_are_wide(compiled: dict[str, dict]) -> None:
    assert compiled["kv_pack"]["loads"]["128"] == 2
    assert compiled["kv_unpack"]["loads"]["128"] == 2
    assert compiled["qkv_post"]["loads"]["128"] >= 10
