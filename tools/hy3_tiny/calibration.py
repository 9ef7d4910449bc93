"""Writes texts such as hy3-tiny was trained on, tasks among them, for `katydid quantize` to calibrate and learn by.

    python -m tools.hy3_tiny.calibration DATA OUT [--rows 1000] [--length 4096] [--asking 0.0]

DATA is what `prepare` made. Every row becomes a file of OUT; with the same arguments the same ones. Words of the tasks
are those of the training: every sixth is kept for the evaluation. `--asking` is the share of rows that state facts and
ask for every one: what a long context costs shows in answers, and the training's long rows have few.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tools.hy3_tiny import tasks
from tools.hy3_tiny.batches import Maker, MissingDataError, Phase

TASKS = 0.5  # share of rows that hold tasks, as late in the training
BATCH = 16  # rows


def rows_of(maker: Maker, rows: int, length: int, asking: float) -> Iterator[np.ndarray]:
    """uint16 ids of each row, about ``length``."""
    for step in range(-(-rows // BATCH)):
        for row, ids in enumerate(maker.batch(step).ids[: rows - step * BATCH], start=step * BATCH):
            rng = random.Random(f"{maker.seed}/{row}")
            if rng.random() >= asking:
                yield ids
                continue
            task = tasks.recall(rng, maker.words, length, every=True)
            made = tasks.scatter(rng, maker.tokenizer, task, ids, length)
            yield ids if made is None else made[0]


def write_texts(data: Path, out: Path, *, rows: int, length: int, seed: int = 1, asking: float = 0.0) -> None:
    """`rows` files of about `length` tokens each; raises MissingDataError, FileExistsError where OUT holds files."""
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    steps = -(-rows // BATCH)
    # What asks for everything is woven into plain rows.
    phase = Phase(((length, 1.0),), {length: TASKS if not asking else 0.0})
    maker = Maker(data, seed, steps, BATCH * length, ((1.01, phase),))
    out.mkdir(parents=True, exist_ok=True)
    for row, ids in enumerate(rows_of(maker, rows, length, asking)):
        text = maker.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        (out / f"{row:05d}.txt").write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--asking", type=float, default=0.0)
    options = parser.parse_args()
    if not 0 <= options.asking <= 1:
        parser.error(f"--asking is {options.asking}, allowed are 0 to 1")
    try:
        write_texts(options.data, options.out, rows=options.rows, length=options.length, asking=options.asking)
    except (MissingDataError, FileExistsError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
