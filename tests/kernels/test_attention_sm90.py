"""Every Gluon attention kernel assembles for sm_90: registers, wgmma, TMA, and the CTAs that an SM should hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
SM_SHARED = 227 * 1024
# What the launch code counts on: a kernel that grows past it halves the CTAs of an SM without any error.
CTAS_PER_SM = {"decode_hopper_kernel": 2, "decode_wide_kernel": 2, "prefill_hopper_kernel": 1}


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_attention.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_hardly_anything_spills(compiled: list[dict]) -> None:
    """The few bytes allowed lie outside the loops over tiles."""
    assert {k["case"]: k["stack_bytes"] for k in compiled if k["stack_bytes"] > 64} == {}


def test_the_promised_ctas_fit_an_sm(compiled: list[dict]) -> None:
    for kernel in compiled:
        ctas = CTAS_PER_SM[kernel["kernel"]]
        assert ctas * (kernel["shared_bytes"] + 1024) <= SM_SHARED, kernel["case"]


def test_hopper_instructions(compiled: list[dict]) -> None:
    assert {k["kernel"] for k in compiled} == set(CTAS_PER_SM)
    for kernel in compiled:
        multiply, other = ("QGMMA", "HGMMA") if "fp8" in kernel["case"] else ("HGMMA", "QGMMA")
        opcodes = kernel["opcodes"]
        assert opcodes.get(multiply, 0) >= 6, kernel["case"]
        assert not {other, "HMMA", "QMMA"} & opcodes.keys(), kernel["case"]
        assert opcodes.get("UTMALDG", 0) >= 2, kernel["case"]
