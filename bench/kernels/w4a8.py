"""Measures W4A8 against our own fp8 on one Hopper GPU, a row a bar, to ``w4a8.json``.

    PYTHONPATH=kernels:bench/kernels python bench/kernels/w4a8.py --out bench/results

Each part is a process of its own; one whose kernels do not match float64 reports no speed. `gemm.py` says the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results_file import write_rows

PARTS = ("linear", "TP8", "EP8")


def part(name: str) -> dict[str, Any]:
    """Run one part in this process."""
    from w4a8_cases import experts, linear

    return linear() if name == "linear" else experts(name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--limit-s", type=float, default=180.0)
    parser.add_argument("--part", choices=PARTS)
    arguments = parser.parse_args()
    if arguments.part:
        print("\nRESULT " + json.dumps(part(arguments.part)), flush=True)
        return
    os.environ.setdefault("GEMM_BENCH_LOCK", tempfile.mkstemp()[1])
    command = [sys.executable, __file__, "--part"]
    running = {name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in PARTS}
    rows: list[dict[str, Any]] = []
    for name, process in running.items():
        try:
            output, _ = process.communicate(timeout=arguments.limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        results = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")]
        print(name, json.dumps(results[-1] if results else "failed: " + output[-1500:]), flush=True)
        rows += results[-1]["rows"] if results else []
    write_rows(arguments.out / "w4a8.json", rows, "w4a8.py")


if __name__ == "__main__":
    main()
