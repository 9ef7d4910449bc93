"""Puts the figures of several runs beside their bars, into one file of bench/results."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["NOTHING", "Row", "put_beside_bars"]

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]

NOTHING: Row = {"floor": None, "peer": None, "peer_value": None, "bar": None, "met": None}
"""What a row is held against, where nothing is known."""


def put_beside_bars(about: str, name: str, script: str, beside: Callable[[dict[str, Row]], list[Row]]) -> None:
    """Writes bench/results/`name` of what ``bench/<script>`` was given: files of --json, whose rows by their figures
    go through `beside`; of equal figures the last file's stays.

    The results themselves may be the first file: what no other file has stays, with the commit that it is of; rows
    marked `derived` are made anew.
    """
    results = ROOT / "bench" / "results" / name
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--commit", help="that the figures are of; default: HEAD")
    options = parser.parse_args()
    record: dict[str, Any] = {"commit": options.commit or _head(), "command": f"PYTHONPATH=. python bench/{script}"}
    rows: dict[str, Row] = {}
    for path in options.files:
        told = json.loads(path.read_text())
        record |= {key: told[key] for key in ("gpu", "versions", "step_times") if key in told}
        old = {"commit": told["commit"]} if path.resolve() == results and "commit" in told else {}
        rows |= {row["figure"]: old | row for row in told["rows"] if not row.get("derived")}
    record["rows"] = beside(rows)
    results.write_text(json.dumps(record, indent=1) + "\n")
    for row in record["rows"]:
        if row["bar"] is not None:
            print(f"{row['figure']}: {row['value']} {row['unit']} (bar {row['bar']}, met {row['met']})")


def _head() -> str:
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT)
    return head.stdout.strip()
