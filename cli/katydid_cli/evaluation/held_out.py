"""The held-out documents that text and code figures are measured on, as `tools/hy3_tiny/prepare.py` writes them."""

from __future__ import annotations

import json
import lzma
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from katydid_cli.evaluation.scorer import MissingDataError

Kind = Literal["code", "text"]


@dataclass(frozen=True)
class HeldOut:
    """One document that no training data holds."""

    source: str
    path: str
    text: str


def load_held_out(folder: Path, kind: Kind) -> list[HeldOut]:
    """All held-out documents of a kind, shuffled the same way everywhere; raises MissingDataError."""
    path = folder / "held_out" / f"{kind}.xz"
    if not path.is_file():
        raise MissingDataError(
            f"held-out {kind} is not at {path}: run `python -m tools.hy3_tiny.fetch DOWNLOADS --held-out` and "
            f"`python -m tools.hy3_tiny.prepare DOWNLOADS {folder} --held-out`, or name its folder with --data"
        )
    try:
        entries = json.loads(lzma.decompress(path.read_bytes()))
        documents = [HeldOut(str(e["source"]), str(e["path"]), str(e["text"])) for e in entries]
    except (lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise MissingDataError(f"{path} is not a file of held-out documents: {error}") from error
    documents.sort(key=lambda d: (d.source, d.path))
    random.Random(0).shuffle(documents)
    return documents
