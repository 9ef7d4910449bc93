"""The Gluon router kernels assemble for sm_90 without spilling, multiply with wgmma and copy with TMA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
SHARED_LIMIT = 227 * 1024


def test_compiled_kernels() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_router.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    compiled = [json.loads(line) for line in run.stdout.splitlines()]
    assert {k["kernel"] for k in compiled} == {"few_tokens_kernel", "many_tokens_kernel", "normed_router_kernel"}
    # The few bytes allowed lie after the loop over K.
    assert {k["case"]: k["stack_bytes"] for k in compiled if k["stack_bytes"] > 64} == {}
    for kernel in compiled:
        assert kernel["shared_bytes"] <= SHARED_LIMIT, kernel["case"]
        opcodes = kernel["opcodes"]
        assert opcodes.get("HGMMA", 0) >= 8, kernel["case"]
        assert "HMMA" not in opcodes, kernel["case"]
        assert opcodes.get("UTMALDG", 0) >= 1, kernel["case"]
