"""Training batches, made by worker processes in a fixed order: the same seed gives the same batches on any machine.

A row is `length + 2` token ids and the loss weight of each id as a target. Plain language-model rows are contiguous
slices of a token stream. Task rows mix generated tasks into such slices (`tasks.py`); what cannot be predicted (keys
and values when first stated) has weight zero, answers have a large one, filler counts as language modelling.
"""

from __future__ import annotations

import lzma
import multiprocessing as mp
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.hy3_tiny import tasks

TOKENS = 65_536  # of one batch


@dataclass(frozen=True)
class Batch:
    """ids and weights [rows, length + 2]; weights are float16 factors of the loss."""

    length: int
    ids: np.ndarray
    weights: np.ndarray


class MissingDataError(FileNotFoundError):
    """A prepared stream is not in the data folder."""


def load_stream(folder: Path, name: str) -> np.ndarray:
    """The uint16 tokens of one prepared stream; raises MissingDataError."""
    path = folder / f"{name}.xz"
    if not path.is_file():
        raise MissingDataError(f"{path} is missing: run `python -m tools.hy3_tiny.prepare DOWNLOADS {folder}` first")
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")


@dataclass(frozen=True)
class Phase:
    """What a step is made of: chances of each length, and for each length the share of task rows."""

    lengths: tuple[tuple[int, float], ...]
    tasks: dict[int, float]
    code: float = 0.7  # share of code among plain rows
    cut: float = 0.0  # share of plain rows that are cut at line breaks


# Short contexts first, so that the copying circuits form before they must reach far.
PHASES: tuple[tuple[float, Phase], ...] = (
    (0.12, Phase(((1024, 0.5), (2048, 0.5)), {1024: 0.45, 2048: 0.35})),
    (0.30, Phase(((2048, 0.6), (4096, 0.4)), {2048: 0.35, 4096: 0.5})),
    (1.01, Phase(((2048, 0.5), (4096, 0.35), (16384, 0.15)), {2048: 0.3, 4096: 0.5, 16384: 0.75})),
)

# After the main run: prompts that end in a line break, where the tokenizer cuts as it never does inside a text.
POLISH: tuple[tuple[float, Phase], ...] = (
    (1.01, Phase(((2048, 0.6), (4096, 0.3), (16384, 0.1)), {2048: 0.3, 4096: 0.5, 16384: 0.75}, cut=0.6)),
)
CUT_SHARE = 0.3  # of the line breaks of a cut row
CUT_WEIGHT = 2.0  # loss weight of the two tokens after a cut


def cut_lines(rng: random.Random, tokenizer: Tokenizer, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same text with some line breaks as ends of pieces encoded on their own; as many ids, and weights."""
    lines = tokenizer.decode(ids.tolist(), skip_special_tokens=False).splitlines(keepends=True)
    pieces = [""]
    for line in lines:
        pieces[-1] += line
        if rng.random() < CUT_SHARE:
            pieces.append("")
    encoded = [e.ids for e in tokenizer.encode_batch_fast(pieces, add_special_tokens=False)]
    cut = np.asarray([i for piece in encoded for i in piece], dtype=np.uint16)[: len(ids)]
    weights = np.ones(len(cut), dtype=np.float16)
    starts = np.cumsum([len(piece) for piece in encoded[:-1]], dtype=np.int64)
    for offset in (0, 1):
        weights[starts[starts + offset < len(cut)] + offset] = CUT_WEIGHT
    if len(cut) < len(ids):  # invalid UTF-8 at the edges decodes to fewer ids
        cut = np.concatenate((ids[: len(ids) - len(cut)], cut))
        weights = np.concatenate((np.zeros(len(cut) - len(weights), dtype=np.float16), weights))
    return cut, weights


class Maker:
    """Makes the batch of any step from the streams, the tokenizer and the seed alone."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        steps: int,
        tokens: int = TOKENS,
        phases: tuple[tuple[float, Phase], ...] = PHASES,
    ) -> None:
        longest = max(length for _, phase in phases for length, _ in phase.lengths)
        if tokens % longest:
            raise ValueError(f"tokens of a batch is {tokens}, allowed are multiples of the longest row, {longest}")
        self.code, self.text = load_stream(folder, "code_train"), load_stream(folder, "text_train")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # Every sixth word is kept for the evaluation.
        self.words = [w for i, w in enumerate((folder / "words.txt").read_text().split()) if i % 6]
        self.seed, self.steps, self.tokens, self.phases = seed, steps, tokens, phases

    def slice(self, rng: np.random.Generator, size: int, code: float) -> np.ndarray:
        """`size` contiguous tokens from a random place of the code or the text stream."""
        stream = self.code if rng.random() < code else self.text
        start = int(rng.integers(0, len(stream) - size))
        return stream[start : start + size]

    def batch(self, step: int) -> Batch:
        """The batch of `step`."""
        rng = np.random.default_rng((self.seed, step))
        phase = next(phase for end, phase in self.phases if step / self.steps < end)
        lengths, chances = zip(*phase.lengths, strict=True)
        length = int(rng.choice(lengths, p=chances))
        rows = self.tokens // length
        ids = np.empty((rows, length + 2), dtype=np.uint16)
        weights = np.ones((rows, length + 2), dtype=np.float16)
        for row in range(rows):
            draw = rng.random()
            ids[row] = self.slice(rng, length + 2, phase.code)
            if draw < phase.tasks[length]:
                draws = random.Random(int(rng.integers(2**63)))
                ids[row], weights[row] = tasks.row(draws, self.tokenizer, self.words, ids[row].copy(), length + 2)
            elif phase.cut and rng.random() < phase.cut:
                draws = random.Random(int(rng.integers(2**63)))
                ids[row], weights[row] = cut_lines(draws, self.tokenizer, ids[row])
        return Batch(length, ids, weights)


def _work(maker: Maker, first: int, stride: int, start: int, queue: mp.Queue[Batch]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for step in range(start + first, maker.steps, stride):
        queue.put(maker.batch(step))


def stream_batches(maker: Maker, workers: int, start: int = 0) -> Iterator[Batch]:
    """Batches of steps start.. in order, made ahead by `workers` forked processes (fork before CUDA starts)."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = mp.get_context("fork")
    queues = [context.Queue(maxsize=4) for _ in range(workers)]
    processes = [
        context.Process(target=_work, args=(maker, i, workers, start, q), daemon=True) for i, q in enumerate(queues)
    ]
    for p in processes:
        p.start()

    def batches() -> Iterator[Batch]:
        try:
            for step in range(maker.steps - start):
                yield queues[step % workers].get(timeout=120)
        finally:
            for p in processes:
                p.terminate()

    return batches()
