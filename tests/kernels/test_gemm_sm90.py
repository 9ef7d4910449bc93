"""Every Gluon GEMM kernel assembles for sm_90 without spilling, multiplies with wgmma and copies with TMA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
SHARED_LIMIT = 227 * 1024


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_gluon.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_nothing_spills(compiled: list[dict]) -> None:
    assert {(k["case"], k["kernel"]): k["spills"] for k in compiled if k["spills"]} == {}


def test_shared_memory_fits(compiled: list[dict]) -> None:
    assert max(k["shared_bytes"] for k in compiled) <= SHARED_LIMIT


def test_hopper_instructions(compiled: list[dict]) -> None:
    assert {k["kernel"] for k in compiled} == {
        "wide_gemm_kernel",
        "narrow_gemm_kernel",
        "experts_up_kernel",
        "experts_decode_kernel",
        "experts_few_kernel",
    }
    for kernel in compiled:
        multiply, other = ("QGMMA", "HGMMA") if "fp8" in kernel["case"] else ("HGMMA", "QGMMA")
        opcodes = kernel["opcodes"]
        assert opcodes.get(multiply, 0) >= 4, kernel
        assert not {other, "HMMA", "QMMA", "FFMA2"} & opcodes.keys(), kernel
        assert opcodes.get("UTMALDG", 0) >= 2, kernel
