"""Every W4A8 kernel assembles for sm_90 without spilling, unpacks in registers, multiplies by wgmma, copies by TMA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
SHARED_LIMIT = 227 * 1024
# Two CTAs of the kernel for few rows share an SM.
HALF_AN_SM = (228 // 2 - 1) * 1024


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_w4a8.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_nothing_spills(compiled: list[dict]) -> None:
    # The grouped kernel keeps a few numbers of a tile's end in local memory while it multiplies.
    allowed = {"grouped_w4a8_kernel": 40}
    spilling = {(k["case"], k["kernel"]): k["spills"] for k in compiled if k["spills"] > allowed.get(k["kernel"], 0)}
    assert spilling == {}


def test_shared_memory_fits(compiled: list[dict]) -> None:
    assert max(k["shared_bytes"] for k in compiled) <= SHARED_LIMIT
    assert max(k["shared_bytes"] for k in compiled if k["kernel"] == "narrow_w4a8_kernel") <= HALF_AN_SM


def test_hopper_instructions(compiled: list[dict]) -> None:
    assert {k["kernel"] for k in compiled} == {
        "few_w4a8_kernel",
        "narrow_w4a8_kernel",
        "grouped_w4a8_kernel",
        "experts_decode_w4a8_kernel",
        "experts_few_w4a8_kernel",
    }
    for kernel in compiled:
        opcodes = kernel["opcodes"]
        if kernel["kernel"] == "few_w4a8_kernel":
            assert opcodes.get("HMMA", 0) >= 8, kernel
            assert not {"QGMMA", "HGMMA", "I2F"} & opcodes.keys(), kernel
            continue
        assert opcodes.get("QGMMA", 0) >= 8, kernel
        assert not {"HGMMA", "HMMA", "QMMA"} & opcodes.keys(), kernel
        assert opcodes.get("UTMALDG", 0) >= 2, kernel
        # No value is looked up or converted: codes become operands by masks and shifts alone.
        assert opcodes["LOP3"] >= 16, kernel
