"""Measures the GEMM kernels and routed experts against their bars on one Hopper GPU, beside cuBLAS in the same run.

    PYTHONPATH=kernels:bench/kernels python bench/kernels/gemm.py --out bench/results

Each part is a process of its own, so a part that hangs or fails takes nothing else with it. Parts compile and check
side by side, then take turns at the GPU; one whose kernels do not match float64 reports no speed. A row a bar goes to
``gemm.json`` and ``moe.json``; errors, times of single launches and tiles beside each other to ``gemm_parts.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

Found = dict[str, dict[str, Any]]
GROUPS = {
    "gemm": ("bf16", "fp8 promoted", "fp8", "few rows"),
    "moe": ("TP8", "EP8", "bf16 TP8", "rows", "tiles TP8", "tiles EP8", "odd shapes"),
}


def part(name: str) -> dict[str, Any]:
    """Run one part in this process."""
    from gemm_cases import dense, few_rows
    from moe_cases import experts, odd_shapes, tiles
    from row_cases import rows

    runs: dict[str, Callable[[], dict[str, Any]]] = {"few rows": few_rows, "odd shapes": odd_shapes, "rows": rows}
    runs |= {kind: lambda kind=kind: dense(kind) for kind in GROUPS["gemm"][:3]}
    runs |= {shard: lambda shard=shard: experts(shard) for shard in GROUPS["moe"][:3]}
    runs |= {f"tiles {shard}": lambda shard=shard: tiles(shard) for shard in ("TP8", "EP8")}
    return runs[name]()


def run_parts(limit_s: float, out: Path) -> None:
    start = time.monotonic()
    os.environ["GEMM_BENCH_LOCK"] = tempfile.mkstemp()[1]
    command = [sys.executable, __file__, "--part"]
    running = {
        name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for names in GROUPS.values()
        for name in names
    }
    found: Found = {}
    while running:
        for name, process in list(running.items()):
            if process.poll() is None and time.monotonic() - start < limit_s:
                continue
            process.kill()
            output, _ = process.communicate()
            results = [line[7:] for line in output.splitlines() if line.startswith("RESULT ")]
            found[name] = json.loads(results[-1]) if results else {"failed": output[-1500:], "rows": []}
            del running[name]
            rest = {key: value for key, value in found[name].items() if key != "rows"}
            print(f"{time.monotonic() - start:4.0f} s  {name}: {json.dumps(rest)}", flush=True)
            for row in found[name]["rows"]:
                print("   ", json.dumps(row), flush=True)
            write(out, found)
        time.sleep(0.05)


def write(out: Path, found: Found) -> None:
    """Write what there is so far: a run cut short keeps its rows."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "commit": os.environ.get("KATYDID_COMMIT") or head.stdout.strip(),
        "command": "PYTHONPATH=kernels:bench/kernels python bench/kernels/gemm.py",
    }
    out.mkdir(parents=True, exist_ok=True)
    for group, names in GROUPS.items():
        rows = [row for name in names for row in found.get(name, {}).get("rows", [])]
        (out / f"{group}.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    (out / "gemm_parts.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--part")
    arguments = parser.parse_args()
    if arguments.part:
        print("\nRESULT " + json.dumps(part(arguments.part)), flush=True)
    else:
        run_parts(arguments.limit_s, arguments.out)


if __name__ == "__main__":
    main()
