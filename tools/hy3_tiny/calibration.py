"""Writes texts such as hy3-tiny was trained on, tasks among them, for `katydid quantize` to calibrate and learn by.

    python -m tools.hy3_tiny.calibration DATA OUT [--rows 1000] [--length 4096]

DATA is what `prepare` made. Every row becomes a file of OUT; with the same arguments the same ones. Words of the tasks
are those of the training: every sixth is kept for the evaluation.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.hy3_tiny.batches import Maker, MissingDataError, Phase

TASKS = 0.5  # share of rows that hold tasks, as late in the training
BATCH = 16  # rows


def write_texts(data: Path, out: Path, *, rows: int, length: int, seed: int = 1) -> None:
    """`rows` files of about `length` tokens each; raises MissingDataError, FileExistsError where OUT holds files."""
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    steps = -(-rows // BATCH)
    maker = Maker(data, seed, steps, BATCH * length, ((1.01, Phase(((length, 1.0),), {length: TASKS})),))
    out.mkdir(parents=True, exist_ok=True)
    for step in range(steps):
        for row, ids in enumerate(maker.batch(step).ids[: rows - step * BATCH]):
            text = maker.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            (out / f"{step * BATCH + row:05d}.txt").write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--length", type=int, default=4096)
    options = parser.parse_args()
    try:
        write_texts(options.data, options.out, rows=options.rows, length=options.length)
    except (MissingDataError, FileExistsError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
