"""Results files of the kernels' benchmarks: what was measured, on which GPU, versions and commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import triton

__all__ = ["replace_rows", "write_rows"]

Rows = list[dict[str, Any]]


def write_rows(path: Path, rows: Rows, script: str) -> None:
    """Writes `rows` of ``bench/kernels/<script>``, a file of its own."""
    _write(path, {**_gpu(), **_origin(script), "rows": rows})


def replace_rows(path: Path, rows: Rows, script: str) -> None:
    """Writes `rows` into a file that several benchmarks share: each replaces its own and leaves the others'."""
    origin = _origin(script)
    others = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in others if row.get("command") != origin["command"]]
    _write(path, {**_gpu(), "rows": kept + [row | origin for row in rows]})


def _gpu() -> dict[str, Any]:
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    return {"gpu": torch.cuda.get_device_name(), "versions": versions}


def _origin(script: str) -> dict[str, str]:
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": os.environ.get("KATYDID_COMMIT") or head.stdout.strip(),
        "command": f"PYTHONPATH=kernels:bench/kernels python bench/kernels/{script}",
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
