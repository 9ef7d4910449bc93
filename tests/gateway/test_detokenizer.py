"""Streamed detokenising equals decoding at once, for every split and for ids that are no UTF-8."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_gateway.text.detokenizer import Vocabulary, byte_alphabet
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.gateway.model_folders import tiny_tokenizer

TOKENIZER = tiny_tokenizer(["<|end|>"], ("<tool_sep>",))
VOCABULARY = Vocabulary(TOKENIZER)


def sentencepiece() -> Tokenizer:
    """A vocabulary in Llama 2's style: words with ▁, bytes as <0xE6>."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "▁a", "bc", "▁the"]
    tokenizer = Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def streamed(vocabulary: Vocabulary, ids: list[int], cuts: list[int], *, skip_special: bool = True) -> list[str]:
    detokenizer = vocabulary.detokenizer(skip_special=skip_special)
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [detokenizer.feed(ids[start:end]) for start, end in pairwise(edges)]
    return [*pieces, detokenizer.finish()]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, VOCABULARY.size - 1), max_size=40), st.lists(st.integers(0, 40), max_size=6), st.booleans()
)
def test_any_ids_in_any_split_equal_decoding_at_once(ids: list[int], cuts: list[int], skip: bool) -> None:
    expected = TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(VOCABULARY, ids, cuts, skip_special=skip)) == expected


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_text_comes_back_and_no_piece_holds_half_a_character(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    pieces = streamed(VOCABULARY, ids, list(range(len(ids))))
    assert "".join(pieces) == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


def test_a_character_of_four_tokens_comes_out_whole_and_an_incomplete_one_at_the_end() -> None:
    alphabet = {byte: character for character, byte in byte_alphabet().items()}
    ids = [TOKENIZER.token_to_id(alphabet[byte]) for byte in "🦗".encode()]
    assert streamed(VOCABULARY, ids, [1, 2, 3]) == ["", "", "", "🦗", ""]
    assert streamed(VOCABULARY, ids[:3], [1, 2]) == ["", "", "", "�"]


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    letter = TOKENIZER.token_to_id("a")
    assert VOCABULARY.decode([letter, 10_000, letter]) == "aa"
    assert VOCABULARY.raw(10_000) == b""


def test_special_tokens_are_hidden_and_visible_ones_stay() -> None:
    ids = [TOKENIZER.token_to_id(token) for token in ("<|end|>", "a", "<tool_sep>")]
    assert VOCABULARY.decode(ids) == "a<tool_sep>"
    assert VOCABULARY.decode(ids, skip_special=False) == "<|end|>a<tool_sep>"
    assert VOCABULARY.raw(ids[0]) == b"<|end|>"


SENTENCEPIECE = sentencepiece()


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abcdefgh é東🦗", max_size=20))
def test_vocabularies_that_are_not_byte_level_stream_the_same_text(text: str) -> None:
    vocabulary = Vocabulary(SENTENCEPIECE)
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    pieces = streamed(vocabulary, ids, list(range(len(ids))))
    assert "".join(pieces) == SENTENCEPIECE.decode(ids)
    assert not any("�" in piece for piece in pieces)


def test_bad_bytes_do_not_hold_back_what_follows() -> None:
    vocabulary = Vocabulary(SENTENCEPIECE)
    bad = SENTENCEPIECE.token_to_id("<0xFF>")
    letter = SENTENCEPIECE.token_to_id("a")
    pieces = streamed(vocabulary, [letter, *[bad] * 6, letter], list(range(8)))
    assert "".join(pieces).endswith("a")
    assert pieces[0] == "a"


@pytest.mark.parametrize("byte", [0x00, 0x20, 0x7F, 0xA0, 0xAD, 0xFF])
def test_the_alphabet_covers_every_byte_once(byte: int) -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert byte in alphabet.values()
    assert all(character.isprintable() for character in alphabet)
