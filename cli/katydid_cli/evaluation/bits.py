"""Bits per byte of held-out text or code: independent of the tokenizer, hence comparable with any other model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from katydid_cli.evaluation.figures import Figure, Item, estimate
from katydid_cli.evaluation.held_out import HeldOut, Kind
from katydid_cli.evaluation.scorer import Scorer
from katydid_cli.evaluation.text import ModelText

WINDOW = 2048  # tokens a prediction can see at most; after the first window at least half of it


def windows(count: int, window: int) -> Iterator[tuple[int, int, int]]:
    """(start, first scored, end) of overlapping windows over `count` ids: every id after the first is scored once."""
    start, scored = 0, 1
    while scored < count:
        end = min(count, start + window)
        yield start, scored, end
        start, scored = end - window // 2, end


def document_item(scorer: Scorer, text: ModelText, document: HeldOut, window: int = WINDOW) -> Item:
    """Bits of one document over its bytes."""
    ids = [text.bos, *text.encode(document.text)]
    window = min(window, scorer.max_length)
    nats = 0.0
    for start, scored, end in windows(len(ids), window):
        nats -= sum(scorer.score(ids[start:end]).logprobs[scored - start - 1 :])
    return Item(nats / math.log(2), len(document.text.encode()))


def first_bytes(documents: Sequence[HeldOut], budget: int) -> list[HeldOut]:
    """The first documents, `budget` bytes in all or a little more."""
    chosen: list[HeldOut] = []
    size = 0
    for document in documents:
        if size >= budget:
            break
        chosen.append(document)
        size += len(document.text.encode())
    return chosen


def bits_per_byte(scorer: Scorer, text: ModelText, documents: Sequence[HeldOut], kind: Kind, budget: int) -> Figure:
    """`<kind>.bits_per_byte` over the first documents of `budget` bytes."""
    items = [document_item(scorer, text, document) for document in first_bytes(documents, budget)]
    return estimate(f"{kind}.bits_per_byte", items, "bit/byte", "lower")
