"""Calibration texts of hy3-tiny: lengths, repeatability, and what stands in the way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tools.hy3_tiny.batches import MissingDataError
from tools.hy3_tiny.calibration import write_texts


def test_texts_have_their_length_and_are_the_same_again(data: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("first", "again"):
        write_texts(data, tmp_path / name, rows=5, length=1024)
    made = [path.read_text() for path in sorted((tmp_path / "first").iterdir())]
    assert made == [path.read_text() for path in sorted((tmp_path / "again").iterdir())]
    assert len(made) == len(set(made)) == 5
    for text in made:  # pieces at the cut edges may be encoded in a token more or less
        assert 900 < len(tokenizer.encode(text, add_special_tokens=False).ids) < 1200


def test_rows_that_ask_for_every_fact(data: Path, tmp_path: Path) -> None:
    write_texts(data, tmp_path / "out", rows=3, length=2048, asking=1.0)
    for path in (tmp_path / "out").iterdir():
        values = re.findall(r"\b\d{5}\b", path.read_text())
        twice = [value for value in set(values) if values.count(value) >= 2]
        assert len(twice) >= 2
        assert len(twice) >= 0.9 * len(set(values)), "each is stated and asked for"


def test_what_stands_in_the_way(data: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        write_texts(data, tmp_path / "full", rows=1, length=1024)
    with pytest.raises(MissingDataError, match="code_train"):
        write_texts(tmp_path / "none", tmp_path / "out", rows=1, length=1024)
