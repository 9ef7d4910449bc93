"""Bits, recall, choice and acceptance over scorers whose answers are known."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_cli.evaluation.acceptance import acceptance
from katydid_cli.evaluation.bits import bits_per_byte, windows
from katydid_cli.evaluation.choice import multiple_choice, places, questions
from katydid_cli.evaluation.facts import FORMS, draw_keys, make_fact
from katydid_cli.evaluation.held_out import HeldOut, load_held_out
from katydid_cli.evaluation.recall import context_item, evaluation_words, recall
from katydid_cli.evaluation.scorer import Continuation, EvaluationError, MissingDataError
from katydid_cli.evaluation.text import ModelText

from tests.cli.evaluation.paper_scorer import PaperScorer


@given(st.integers(2, 5000), st.integers(2, 600).map(lambda n: 2 * n))
def test_windows_score_every_token_after_the_first_once(count: int, window: int) -> None:
    scored: list[int] = []
    for start, first, end in windows(count, window):
        assert 0 <= start < first < end <= count
        assert end - start <= window
        assert first == 1 or first - start >= window // 2
        scored += range(first, end)
    assert scored == list(range(1, count))


def test_bits_per_byte_is_the_code_length_over_bytes(text: ModelText, documents: list[HeldOut]) -> None:
    document = HeldOut("made", "umlauts", "größer = 'ß'\n" * 40)
    figure = bits_per_byte(PaperScorer(logprob=lambda ids, at: -math.log(2)), text, [document], "code", 10**9)
    assert figure.value == pytest.approx(len(text.encode(document.text)) / len(document.text.encode()))
    assert figure.name == "code.bits_per_byte"
    few = bits_per_byte(PaperScorer(), text, documents, "code", 1)
    assert few.items == 1


@pytest.mark.parametrize("length", [1024, 4096])
def test_recall_asks_what_the_context_states(text: ModelText, documents: list[HeldOut], length: int) -> None:
    scorer = PaperScorer()
    item = context_item(scorer, text, documents, length, "seed")
    (ids,) = scorer.asked
    assert length - 64 <= len(ids) < length
    shown = text.decode(ids)
    assert text.encode(shown) == ids, "the context would be tokenised otherwise by a server"
    assert item.gain == item.base == 8
    # The questions stand after the only empty line that follows the last statement; each value was stated before.
    facts = [
        line for line in shown.splitlines() if any(mark in line for mark in ("code of", "record]", "password", "="))
    ]
    answers = re.findall(r"\b\d{5}\b", shown)
    assert facts
    assert answers
    assert all(answers.count(value) <= 2 for value in answers)


def test_recall_looks_at_the_answers_tokens_and_no_others(text: ModelText, documents: list[HeldOut]) -> None:
    def gain(wrong: Callable[[Sequence[int], int], bool]) -> float:
        scorer = PaperScorer(greedy=lambda ids, at: not wrong(ids, at))
        return context_item(scorer, text, documents, 1024, "seed").gain

    assert gain(lambda ids, at: at == len(ids) - 1) == 8, "the line break after the last answer is no part of it"
    assert gain(lambda ids, at: at == len(ids) - 2) == 7, "the last token of the last answer is"
    assert gain(lambda ids, at: at < len(ids) // 2) == 8, "nothing before the questions counts"


def test_recall_counts_an_answer_only_when_every_token_is_first_choice(
    text: ModelText, documents: list[HeldOut]
) -> None:
    rng = random.Random(5)
    nothing = recall(PaperScorer(greedy=lambda ids, at: rng.random() < 0.5), text, documents, 1024, 3)
    assert nothing.value < 0.3
    assert nothing.name == "recall.1k.accuracy"


def test_facts_differ_by_form_and_keys_are_distinct() -> None:
    facts = [make_fact(form, ("red", "door"), "12345") for form in range(FORMS)]
    assert len({f.statement for f in facts}) == FORMS
    assert all("12345" in f.statement and "12345" in f.answer for f in facts)
    with pytest.raises(ValueError, match="form is 9, allowed are 0 to 3"):
        make_fact(9, ("a", "b"), "1")
    words = evaluation_words()
    keys = draw_keys(random.Random(1), words, 300)
    assert len(set(keys)) == 300
    assert len({a for a, _ in keys}) < 300
    with pytest.raises(ValueError, match="too few pairs"):
        draw_keys(random.Random(1), words[:4], 300)


def test_choice_prefers_the_likelier_continuation_by_byte(text: ModelText, documents: list[HeldOut]) -> None:
    right = multiple_choice(PaperScorer(), text, documents, "code", 8)
    assert right.items == 8
    every = multiple_choice(PaperScorer(), text, documents, "code", 5 * len(documents))
    assert every.items == 5 * len(documents), "documents are asked about again until there are enough questions"
    short = HeldOut("made", "short", "x = 1\n" * 10)
    assert not places(short.text.splitlines(keepends=True))
    assert multiple_choice(PaperScorer(), text, [short, documents[0]], "code", 3).items == 3
    rng = random.Random(2)
    chance = multiple_choice(PaperScorer(logprob=lambda ids, at: -rng.random()), text, documents * 20, "code", 200)
    assert 0.1 < chance.value < 0.45


def test_choice_asks_about_every_place_once(text: ModelText, documents: list[HeldOut]) -> None:
    asked = list(questions(text, documents[:1], "code"))
    assert len(asked) == len(places(documents[0].text.splitlines(keepends=True)))
    assert len({(len(one.ids[0]), *one.ids[0]) for one in asked}) == len(asked)
    for one in asked[:3]:
        for ids, scored, size in zip(one.ids, one.scored, one.sizes, strict=True):
            assert text.decode([ids[i + 1] for i in scored]).encode()[-size:] == text.decode(ids).encode()[-size:]


def test_acceptance_is_prefixes_over_steps(text: ModelText, documents: list[HeldOut]) -> None:
    scorer = PaperScorer(continuation=lambda ids: Continuation([1] * 10, 4, [3, 2, 1]))
    figures = {f.name: f.value for f in acceptance(scorer, text, documents, 3)}
    assert figures["mtp.depth1.acceptance"] == 0.75
    assert figures["mtp.depth3.acceptance"] == 0.25
    assert figures["mtp.tokens_per_step"] == 2.5
    with pytest.raises(EvaluationError, match="no held-out document"):
        acceptance(scorer, text, [HeldOut("made", "short", "x\n")], 3)


def test_held_out_data_is_asked_for_by_name(tmp_path: Path, data: Path, documents: list[HeldOut]) -> None:
    assert sorted(d.path for d in load_held_out(data, "code")) == sorted(d.path for d in documents)
    with pytest.raises(MissingDataError, match=r"held-out code is not at .*: run `python -m tools.hy3_tiny.fetch"):
        load_held_out(tmp_path, "code")
    (data / "held_out" / "code.xz").write_bytes(b"not xz")
    with pytest.raises(MissingDataError, match="is not a file of held-out documents"):
        load_held_out(data, "code")
