"""Golden texts: a digest that two ways of tokenising share, and that any other cut changes."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

import pytest
from katydid_runtime.block_hash import pack_ids
from katydid_runtime.golden_prompts import GOLDEN_TEXTS, golden_digest, tokenised_alone
from tokenizers import Tokenizer, models, pre_tokenizers


def save_tokenizer(folder: Path, *, split: bool) -> None:
    characters = sorted({character for text in GOLDEN_TEXTS for character in text})
    tokenizer = Tokenizer(models.WordLevel({character: place for place, character in enumerate(characters)}, "w"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated") if split else pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_the_digest_is_of_the_ids_and_their_lengths(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, split=True)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    own = [pack_ids(array("I", tokenizer.encode(text).ids)) for text in GOLDEN_TEXTS]
    assert tokenised_alone(tmp_path) == golden_digest(own)
    moved = [own[0] + own[1][:4], own[1][4:], *own[2:]]
    assert golden_digest(moved) != golden_digest(own)
    save_tokenizer(tmp_path, split=False)
    assert tokenised_alone(tmp_path) != golden_digest(own)


def test_without_a_tokenizer_there_is_nothing_to_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert tokenised_alone(tmp_path) == b""
