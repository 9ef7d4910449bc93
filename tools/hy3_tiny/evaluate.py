"""Evaluates a model folder with the training form, on the GPU where there is one.

python -m tools.hy3_tiny.evaluate MODEL DATA
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from katydid_cli.evaluation.report import Result, as_json, as_table
from katydid_cli.evaluation.suite import EXTENTS, TASKS, run_suite

from tools.hy3_tiny.local_scorer import LocalScorer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--extent", choices=sorted(EXTENTS), default="full")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scorer = LocalScorer(args.model, device)
    tasks = args.tasks.split(",")
    figures = run_suite(
        scorer, args.model, args.data, tasks, EXTENTS[args.extent], lambda line: print(line, flush=True)
    )
    results = [Result(f"training form, {device}", [f"--dtype={scorer.dtype}"], figures)]
    if args.json:
        args.json.write_text(as_json(str(args.model), results))
    print(as_table(results))


if __name__ == "__main__":
    main()
