"""The kernels of sparse prefill assemble for sm_90: wgmma and TMA where they belong, and nothing spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
SM_SHARED = 227 * 1024


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_sparse.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_hardly_anything_spills(compiled: list[dict]) -> None:
    """The few bytes allowed lie outside the loops over blocks of keys, as in the dense kernel."""
    assert {line["case"]: line["stack_bytes"] for line in compiled if line["stack_bytes"] > 64} == {}
    assert all(line["shared_bytes"] + 1024 <= SM_SHARED for line in compiled)


def test_hopper_instructions(compiled: list[dict]) -> None:
    attends = [line for line in compiled if line["case"].startswith("attend")]
    assert len(attends) == 2
    for line in attends:
        multiply, other = ("QGMMA", "HGMMA") if "fp8" in line["case"] else ("HGMMA", "QGMMA")
        assert line["opcodes"].get(multiply, 0) >= 6, line["case"]
        assert not {other, "HMMA", "QMMA"} & line["opcodes"].keys(), line["case"]
        assert line["opcodes"].get("UTMALDG", 0) >= 2, line["case"]
    scores = [line for line in compiled if line["kernel"] == "score_kernel"]
    assert all(any(name.startswith("HGMMA") for name in line["opcodes"]) for line in scores)
    assert len(scores) == 1
