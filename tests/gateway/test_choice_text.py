"""One choice's text: token counts, stop strings and log probabilities agree, however tokens are grouped."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_gateway.requests import TokenLogprob
from katydid_gateway.text.choice_text import ChoiceText
from katydid_gateway.text.detokenizer import Vocabulary

from tests.gateway.model_folders import tiny_tokenizer

TOKENIZER = tiny_tokenizer(["<|end|>"])
VOCABULARY = Vocabulary(TOKENIZER)


def entry(token: int) -> TokenLogprob:
    raw = VOCABULARY.raw(token)
    return TokenLogprob(token, raw.decode("utf-8", "replace"), raw, -float(token))


def run(
    ids: list[int], groups: list[int], stops: tuple[str, ...], min_tokens: int = 0, logprobs: bool = True
) -> tuple[str, int, list[TokenLogprob], bool]:
    choice = ChoiceText(VOCABULARY.detokenizer(), stops=stops, min_tokens=min_tokens)
    text, tokens, entries, start = "", 0, [], 0
    while start < len(ids) and not choice.stopped:
        end = start + (groups.pop(0) if groups else 1)
        step = choice.feed(ids[start:end], [entry(id) for id in ids[start:end]] if logprobs else ())
        text, tokens, entries, start = text + step.text, tokens + step.tokens, entries + step.logprobs, end
    rest = choice.finish()
    return text + rest.text, tokens + rest.tokens, entries + rest.logprobs, choice.stopped


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="ab 🦗\n", max_size=30),
    st.lists(st.text(alphabet="ab\n🦗", min_size=1, max_size=3), max_size=2),
    st.lists(st.integers(1, 5), max_size=8),
    st.integers(0, 6),
)
def test_grouping_changes_nothing(text: str, stops: list[str], groups: list[int], min_tokens: int) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    one_by_one = run(ids, [], tuple(stops), min_tokens)
    assert run(ids, list(groups), tuple(stops), min_tokens) == one_by_one
    without = run(ids, list(groups), tuple(stops), min_tokens, logprobs=False)
    assert (without[0], without[1], without[3]) == (one_by_one[0], one_by_one[1], one_by_one[3])


TEXTS = st.text(alphabet="ab 🦗\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n🦗", min_size=1, max_size=3), max_size=3)


def expected(ids: list[int], stops: list[str], min_tokens: int) -> tuple[str, int, list[int], bool]:
    """Text, tokens, those with log probabilities, and whether it stopped: of the whole text, searched from the first
    token that may stop it."""
    detokenizer = VOCABULARY.detokenizer()
    ends = list(accumulate(len(detokenizer.feed([token])) for token in ids))
    spans = list(zip([0, *ends], ends, strict=False))
    text = VOCABULARY.decode(ids)
    begin = spans[min_tokens - 1][0] if 0 < min_tokens <= len(ids) else 0 if not min_tokens else len(text)
    for end in range(begin + 1, len(text) + 1):
        found = [end - len(stop) for stop in stops if text[begin:end].endswith(stop)]
        if found:
            kept = min(found)
            shown = [token for token, (at, to) in zip(ids, spans, strict=True) if at < kept or to <= kept]
            tokens = next(number for number, (_, to) in enumerate(spans, 1) if to >= end)
            return text[:kept], tokens, shown, True
    return text, len(ids), ids, False


@settings(max_examples=250, deadline=None)
@given(TEXTS, STOPS, st.lists(st.integers(1, 5), max_size=8), st.integers(0, 6))
def test_equal_to_what_the_whole_text_says(text: str, stops: list[str], groups: list[int], min_tokens: int) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    shown, tokens, entries, stopped = run(ids, groups, tuple(stops), min_tokens)
    assert (shown, tokens, [entry.token_id for entry in entries], stopped) == expected(ids, stops, min_tokens)


@settings(max_examples=200, deadline=None)
@given(TEXTS, STOPS)
def test_a_log_probability_comes_with_the_end_of_its_tokens_text(text: str, stops: list[str]) -> None:
    choice, detokenizer = ChoiceText(VOCABULARY.detokenizer(), stops=stops), VOCABULARY.detokenizer()
    decoded, shown, ends, given_out = 0, 0, [], 0
    for token in TOKENIZER.encode(text, add_special_tokens=False).ids:
        step = choice.feed([token], [entry(token)])
        decoded += len(detokenizer.feed([token]))
        ends.append(decoded)
        shown += len(step.text)
        given_out += len(step.logprobs)
        if choice.stopped:
            return
        assert given_out == sum(end <= shown for end in ends)


def test_tokens_behind_the_stop_are_not_counted_and_their_logprobs_not_given() -> None:
    ids = [TOKENIZER.token_to_id(letter) for letter in "abXYcd"]
    text, tokens, entries, stopped = run(ids, [6], ("XY",))
    assert (text, tokens, stopped) == ("ab", 4, True)
    assert [item.text for item in entries] == ["a", "b"]


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    ids = [TOKENIZER.token_to_id(letter) for letter in "XaXb"]
    assert run(ids, [], ("X",), min_tokens=0)[:2] == ("", 1)
    assert run(ids, [], ("X",), min_tokens=2)[:2] == ("Xa", 3)


def test_without_stops_text_and_logprobs_all_come_out() -> None:
    ids = TOKENIZER.encode("a🦗b", add_special_tokens=False).ids
    text, tokens, entries, _ = run(ids, [2], ())
    assert text == "a🦗b"
    assert tokens == len(ids) == len(entries)
