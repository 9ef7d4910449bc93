"""Word by word gives the ids of the whole text, for every kind of tokenizer that is cut so; others are left whole."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_gateway.text.words import _TEXT_PATTERNS, WordCache, cuts_at_words
from katydid_runtime.block_hash import pack_ids
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from tests.gateway.model_folders import tiny_tokenizer

PLAIN = tiny_tokenizer(["<|end|>"])
WHOLE = sorted(_TEXT_PATTERNS)


def split_by(pattern: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(PLAIN.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def digits() -> Tokenizer:
    tokenizer = Tokenizer.from_str(PLAIN.to_str())
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


TOKENIZERS = [digits(), *(split_by(pattern) for pattern in WHOLE)]
SPACES = st.text(" \t\n\r\x0b\x1c\x85\xa0\u180e\u2003\u2028\u3000", max_size=4)
WORDS = st.one_of(
    st.text("ab1_'s.!/-", max_size=5), st.text(max_size=4), st.sampled_from(["don't", "x.\n", "é", "e\u0301"])
)
TEXTS = st.lists(st.tuples(SPACES, WORDS), max_size=12).map(lambda parts: "".join(a + b for a, b in parts))


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["digits", *map(str, range(len(WHOLE)))])
@settings(max_examples=80, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=3))
def test_words_give_the_ids_of_the_whole(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert cuts_at_words(tokenizer)
    words = WordCache(lambda pieces: _encoded(tokenizer, pieces))
    whole = _encoded(tokenizer, texts)
    assert words.ids(texts) == whole
    assert words.ids(texts) == whole, "from the cache"


def test_new_text_is_tokenised_whole_and_known_words_are_looked_up() -> None:
    asked: list[list[str]] = []

    def encode(pieces: object) -> list[bytes]:
        asked.append(list(pieces))  # type: ignore[call-overload]
        return _encoded(PLAIN, asked[-1])

    words = WordCache(encode)
    strange = " ".join(f"w{number:x}" for number in range(2000))
    assert words.ids([strange]) == _encoded(PLAIN, [strange])
    assert asked == [[strange]]
    familiar = "the same few words " * 500
    words.ids([familiar])
    assert asked[-1] == ["the", " same", " few", " words", " the", " "]
    assert words.ids([familiar]) == _encoded(PLAIN, [familiar])
    assert len(asked) == 2


def test_tokenizers_that_look_further_are_left_whole() -> None:
    assert not cuts_at_words(split_by(r"[^ ]+ "))
    spaced = Tokenizer.from_str(PLAIN.to_str())
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not cuts_at_words(spaced)
    added = Tokenizer.from_str(PLAIN.to_str())
    added.add_tokens([AddedToken("two words", normalized=True)])
    assert not cuts_at_words(added)
    meta = Tokenizer.from_str(PLAIN.to_str())
    meta.pre_tokenizer = pre_tokenizers.Metaspace()
    assert not cuts_at_words(meta)


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[bytes]:
    return [
        pack_ids(array("I", encoding.ids)) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]
