"""The gateway, the cache service, the SDKs and the command line start on a machine that has no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = [
    "katydid_gateway.__main__",
    "katydid_kvcache.__main__",
    "katydid_client",
    "katydid_cache",
    "katydid_cli.__main__",
]


@pytest.mark.parametrize("module", MODULES)
def test_imports_without_torch(module: str) -> None:
    code = f"import sys; sys.modules.update(torch=None, triton=None, transformers=None); import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
