"""Draws the loss curve of a run from its log.jsonl (needs matplotlib): `python -m tools.hy3_tiny.plot LOG OUT.png`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.log.read_text().splitlines()]
    tokens = [row["tokens"] / 1e6 for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    left.plot(tokens, [row["plain"] for row in rows], label="next token, text and code")
    left.plot(tokens, [row["answers"] for row in rows], label="answers of generated tasks")
    left.set(xlabel="training tokens, millions", ylabel="loss, nat/token", ylim=(0, 4.5), title="Loss")
    left.legend()
    right.plot(tokens, [row["agreement"] for row in rows], label="drafts equal to the trunk's next choice, share")
    right.plot(tokens, [row["scale"] for row in rows], label="learning rate over its peak", color="grey", ls="--")
    right.plot(tokens, [row["max_load"] / 4 for row in rows], label="load of the fullest expert over 4 means", lw=0.7)
    right.set(xlabel="training tokens, millions", ylim=(0, 1.05), title="Draft layer, schedule, balance")
    right.legend(fontsize=8, loc="center right")
    figure.savefig(args.out, dpi=100)


if __name__ == "__main__":
    main()
