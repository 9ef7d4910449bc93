"""Stop strings: found across chunk borders, trimmed, and never more text held back than needed."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_gateway.text.partial_match import held_suffix
from katydid_gateway.text.stop_strings import StopFinder

LETTERS = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """Character by character: the first place where some stop string is complete."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if include else end - max(map(len, ending))], True
    return text, False


def run(chunks: list[str], stops: list[str], include: bool = False) -> tuple[str, bool]:
    finder = StopFinder(stops, include=include)
    text = "".join([finder.feed(chunk) for chunk in chunks])
    return text + ("" if finder.stopped else finder.finish()), finder.stopped


@settings(max_examples=400, deadline=None)
@given(LETTERS, STOPS, st.lists(st.integers(0, 30), max_size=8), st.booleans())
def test_any_split_finds_the_same_stop(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    chunks = [text[start:end] for start, end in pairwise(edges)]
    assert run(chunks, stops, include) == expected(text, stops, include)


@settings(max_examples=200, deadline=None)
@given(LETTERS, STOPS)
def test_nothing_is_held_that_cannot_become_a_stop(text: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    out = ""
    for place, character in enumerate(text):
        out += finder.feed(character)
        if finder.stopped:
            break
        held = text[: place + 1][len(out) :]
        assert len(held) == finder.held
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_newline_before_a_stop_is_not_swallowed() -> None:
    assert run(["line\n", "\nStop"], ["\n\nStop"]) == ("line", True)
    assert run(["line\n", "\nmore"], ["\n\nStop"]) == ("line\n\nmore", False)


def test_the_stop_that_is_complete_first_wins_even_inside_a_longer_one() -> None:
    assert run(["xabc"], ["abcd", "bc"]) == ("xa", True)
    assert run(["xabc"], ["abc", "c"]) == ("x", True)


def test_text_after_the_stop_is_dropped() -> None:
    finder = StopFinder(["END"], include=True)
    assert finder.feed("aENDb") == "aEND"
    assert finder.feed("c") == ""
    assert finder.finish() == ""


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab", max_size=8), st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3))
def test_held_suffix_is_the_longest_there_is(text: str, words: list[str]) -> None:
    beginnings = [word[:length] for word in words for length in range(len(word))]
    assert held_suffix(text, words) == max((len(each) for each in beginnings if text.endswith(each)), default=0)


def test_held_suffix_is_a_proper_prefix() -> None:
    assert held_suffix("xab", ["abc"]) == 2
    assert held_suffix("abc", ["abc"]) == 0
    assert held_suffix("", ["abc"]) == 0
