"""hy3-tiny's tokenizer, words, and prepared data that were made here."""

from __future__ import annotations

import lzma
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from katydid_cli.evaluation.recall import evaluation_words
from tokenizers import Tokenizer

MODEL = Path(__file__).parents[2] / "models" / "hy3-tiny"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="session")
def words() -> list[str]:
    return evaluation_words()


@pytest.fixture(scope="session")
def filler(tokenizer: Tokenizer) -> np.ndarray:
    """Twenty thousand tokens of plain Python."""
    rng = random.Random(0)
    lines = [f"    value_{rng.randrange(99)} = compute({rng.randrange(99)}, other)\n" for _ in range(2000)]
    ids = tokenizer.encode("".join(lines), add_special_tokens=False).ids
    return np.asarray(ids, dtype=np.uint16)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, filler: np.ndarray) -> Path:
    """A data folder as `prepare` writes it, with small streams."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copy(MODEL / "tokenizer.json", folder)
    (folder / "words.txt").write_text("\n".join(evaluation_words()) + "\n")
    for name in ("code_train", "text_train"):
        (folder / f"{name}.xz").write_bytes(lzma.compress(filler.astype("<u2").tobytes()))
    return folder
