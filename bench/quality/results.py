"""Gathers hy3-tiny's figures and holds them against its bars: `bench/results/hy3_tiny.json`.

    python -m bench.quality.results EVAL.json... --baseline BASELINE.jsonl --training SUMMARY.json... \
        --model models/hy3-tiny --output bench/results/hy3_tiny.json

EVAL.json are results of `katydid eval` or `tools.hy3_tiny.evaluate` (a later file's figure wins), BASELINE.jsonl what
`bench.quality.baseline` printed, SUMMARY.json what each training run left.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BARS: dict[str, tuple[float, Callable[[float, float], bool], str]] = {
    "recall.4k.accuracy": (0.90, float.__ge__, ">="),
    "recall.16k.accuracy": (0.70, float.__ge__, ">="),
    "mtp.depth1.acceptance": (0.60, float.__ge__, ">="),
    "training.time": (960.0, float.__le__, "<="),
    "model.size": (24.0, float.__le__, "<="),
}
BELOW_NGRAM = 0.65  # code.bits_per_byte over the n-gram's


def row(figure: str, value: float, unit: str, **extra: Any) -> dict[str, Any]:
    """One row of the results file; a bar of BARS is looked up by the figure's name."""
    made: dict[str, Any] = {"figure": figure, "value": round(value, 4), "unit": unit, "floor": None}
    made |= {"peer": None, "peer_value": None, "bar": None, "met": None}
    if figure in BARS:
        bar, holds, sign = BARS[figure]
        made |= {"bar": f"{sign} {bar:g}", "met": holds(float(value), bar)}
    return made | extra


def figure_rows(evaluations: list[Path], ngram: dict[str, float]) -> list[dict[str, Any]]:
    """Rows of all evaluated figures, with their intervals and where they were measured."""
    rows: dict[str, dict[str, Any]] = {}
    for path in evaluations:
        for result in json.loads(path.read_text())["results"]:
            for f in result["figures"]:
                extra: dict[str, Any] = {"interval": [round(f["low"], 4), round(f["high"], 4)], "items": f["items"]}
                extra["configuration"] = result["configuration"]
                kind = f["name"].split(".")[0]
                if f["name"].endswith("bits_per_byte") and kind in ngram:
                    extra |= {"peer": "interpolated byte 5-gram, same data", "peer_value": round(ngram[kind], 4)}
                if f["name"] == "code.bits_per_byte":
                    bar = BELOW_NGRAM * ngram["code"]
                    extra |= {"bar": f"<= {bar:.4f} (35 % below the 5-gram)", "met": f["value"] <= bar}
                if f["name"].startswith("choice."):
                    extra["floor"] = 0.25
                rows[f["name"]] = row(f["name"], f["value"], f["unit"], **extra)
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Gathers hy3-tiny's figures.")
    parser.add_argument("evaluations", type=Path, nargs="+")
    parser.add_argument("--baseline", type=Path, required=True)
    parser.add_argument("--training", type=Path, nargs="+", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    baseline = [json.loads(line) for line in args.baseline.read_text().splitlines()]
    ngram = {b["kind"]: min(b["witten-bell"], b["absolute-discounting"]) for b in baseline}
    runs = [json.loads(p.read_text()) for p in args.training]
    rows = figure_rows(args.evaluations, ngram)
    rows.append(row("training.time", float(sum(r["seconds"] for r in runs)), "s"))
    rows.append(row("training.tokens", sum(r["tokens"] for r in runs) / 1e6, "million tokens"))
    rows.append(row("model.size", sum(f.stat().st_size for f in args.model.iterdir()) / 2**20, "MiB"))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    body = {
        "gpu": runs[0]["gpu"],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit,
        "command": "tools.hy3_tiny.train, then --resume (docs/hy3-tiny.md); tools.hy3_tiny.evaluate; katydid eval",
        "rows": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(body, indent=1) + "\n")
    for r in rows:
        print(f"{r['figure']:26} {r['value']:>10} {r['unit']:14} {r['bar'] or '':40} {r['met'] if r['bar'] else ''}")


if __name__ == "__main__":
    main()
