"""Tokenising segment by segment gives the ids of the whole text, and remembers within its memory."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_gateway.chain_cache import ChainCache
from katydid_gateway.text.prefixes import RecentPrefixes
from katydid_gateway.text.tokenizer import SegmentCache, TextTokenizer, load_tokenizer
from katydid_runtime.block_hash import ChainKey
from katydid_runtime.errors import ModelFolderError, PromptTooLongError
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors

from tests.gateway.model_folders import tiny_tokenizer

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
TOKENIZER = tiny_tokenizer(SPECIAL, ("<tool>", "<tool_sep>"))
PIECES = st.one_of(st.text(max_size=12), st.sampled_from([*SPECIAL, "<tool>", "<tool_sep>", "<tool", " ", "\n"]))


def encode(tokenizer: TextTokenizer, text: str, **options: bool) -> list[int]:
    return list(array("I", asyncio.run(tokenizer.encode(text, **options))))


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=8).map("".join))
def test_segments_give_the_ids_of_the_whole(text: str) -> None:
    cached = TextTokenizer(TOKENIZER, cache_bytes=1 << 20)
    whole = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert encode(cached, text) == whole
    assert encode(cached, text) == whole, "from the cache"


TURNS = st.lists(st.tuples(st.integers(0, 3), st.text("ab <|im_end|>", max_size=30)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(TURNS)
def test_conversations_that_grow_and_branch_have_the_ids_of_the_whole(turns: list[tuple[int, str]]) -> None:
    cached = TextTokenizer(TOKENIZER, cache_bytes=1 << 22)
    key = ChainKey(b"m")
    chains = ChainCache(1 << 20)
    seen = ["<|im_start|>" + "some words " * 900]
    for place, text in turns:
        seen.append(f"{seen[min(place, len(seen) - 1)]}<|im_end|>{text}<|im_start|>x")
        encoded = asyncio.run(cached.encode_prompt(seen[-1]))
        assert list(array("I", encoded.ids)) == TOKENIZER.encode(seen[-1], add_special_tokens=False).ids
        assert encoded.prefix is not None
        assert encoded.ids.startswith(bytes(encoded.prefix.ids))
        chain = chains.chain(encoded.ids, key, encoded.known, encoded.prefix)
        assert b"".join(chain) == key.extend(encoded.ids)
        # From what was just kept.
        assert chains.chain(encoded.ids, key, encoded.prefix) == chain


def test_prefixes_stay_within_their_memory() -> None:
    prefixes = RecentPrefixes(40_000)
    for number in range(10):
        text = f"{number}" * 10_000
        assert prefixes.put(f"{text} and less", len(text), b"1234" * 2000, 7000) is not None
        assert prefixes.bytes <= 40_000
        for found in (f"{text} and less, or more", f"{text} and more", text):
            assert prefixes.of(found) is not None
        # The end alone is the same.
        assert prefixes.of(f"x{text[1:]}") is None
    assert prefixes.of("0" * 10_000) is None
    assert prefixes.put("x" * 50_000, 50_000, b"", 0) is None
    assert prefixes.put("short", 5, b"", 0) is None


def test_special_tokens_of_the_tokenizer_are_added_once() -> None:
    tokenizer = tiny_tokenizer(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A <|im_end|>", special_tokens=[("<|end|>", 0), ("<|im_end|>", 2)]
    )
    text = TextTokenizer(tokenizer)
    assert encode(text, "hello", special_tokens=True) == tokenizer.encode("hello").ids
    assert encode(text, "", special_tokens=True) == [0, 2]
    assert encode(text, "hello") == tokenizer.encode("hello", add_special_tokens=False).ids


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_reach_beyond_themselves_are_not_split_at(flag: str) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.add_special_tokens([AddedToken("<mask>", normalized=False, **{flag: True})])
    for text in ("a <mask> b", "a<mask>b", "<mask>", " <|end|> <mask>  x"):
        assert encode(TextTokenizer(tokenizer, 1 << 20), text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_vocabulary_that_marks_the_first_word_is_tokenised_whole() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    text = "one<|im_end|>two"
    assert encode(TextTokenizer(tokenizer, 1 << 20), text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_more_added_tokens_than_a_model_takes_are_not_tokenised() -> None:
    tokenizer = TextTokenizer(TOKENIZER, cache_bytes=1 << 20)
    text = "<|im_start|>word<|im_end|>" * 20
    assert asyncio.run(tokenizer.encode_prompt(text, 40)).ids == asyncio.run(tokenizer.encode_prompt(text)).ids
    with pytest.raises(
        PromptTooLongError,
        match="maximum context length is 39 tokens; the prompt is too long: more than 39 tokens > 38",
    ):
        asyncio.run(tokenizer.encode_prompt(text, 39))


def test_very_long_texts_go_one_by_one_and_leave_no_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TextTokenizer(TOKENIZER)
    given_back: list[int] = []
    under_way: list[int] = []
    most: list[int] = []

    def slow(segments: Sequence[str]) -> list[bytes]:
        under_way.append(1)
        most.append(len(under_way))
        time.sleep(0.02)
        under_way.pop()
        return [b""] * len(segments)

    async def several() -> None:
        await asyncio.gather(*(tokenizer.encode("x" * (2**20 + number)) for number in range(1, 4)))

    monkeypatch.setattr(tokenizer, "_encode_segments", slow)
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(malloc_trim=given_back.append))
    asyncio.run(several())
    assert most == [1, 1, 1]
    assert given_back == [0, 0, 0]
    asyncio.run(tokenizer.encode("x" * 2**18))
    assert given_back == [0, 0, 0], "those that are only long cost no search of the heap"


def test_long_texts_leave_the_loop_running() -> None:
    async def scenario() -> int:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(turn())
        await TextTokenizer(TOKENIZER).encode("some words and more. " * 20_000)
        task.cancel()
        return turns

    assert asyncio.run(scenario()) > 10


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(alphabet="ab🦗", max_size=3), max_size=30), st.integers(0, 2000))
def test_the_cache_stays_within_its_memory(texts: list[str], capacity: int) -> None:
    cache = SegmentCache(capacity)
    for text in texts:
        ids = text.encode() * 9
        cache.put(text, ids)
        assert cache.bytes <= capacity
        assert cache.get(text) in (None, ids)


def test_the_least_recently_used_segment_goes_first() -> None:
    cache = SegmentCache(3 * 270)
    for text in "abc":
        cache.put(text, b"0123")
    cache.get("a")
    cache.put("d", b"0123")
    assert [text for text in "abcd" if cache.get(text)] == ["a", "c", "d"]


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
