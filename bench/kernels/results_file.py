"""A results file that several benchmarks share: each replaces its own rows and leaves the others'."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import triton

__all__ = ["write_rows"]


def write_rows(path: Path, rows: list[dict[str, Any]], script: str) -> None:
    """Writes `rows` as those of ``bench/kernels/<script>``, with the commit and versions they were measured at."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "commit": os.environ.get("KATYDID_COMMIT") or head.stdout.strip(),
        "command": f"PYTHONPATH=kernels:bench/kernels python bench/kernels/{script}",
    }
    others = json.loads(path.read_text())["rows"] if path.exists() else []
    content = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "rows": [row for row in others if row.get("command") != about["command"]] + [row | about for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
