"""Multiple choice by likelihood: which of four continuations of a held-out file is the real one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from katydid_cli.evaluation.figures import Figure, Item, estimate
from katydid_cli.evaluation.held_out import HeldOut, Kind
from katydid_cli.evaluation.scorer import Scorer
from katydid_cli.evaluation.text import ModelText

CHOICES = 4
PROMPT_LINES = 24
ANSWER_LINES = 2
LONGEST_PROMPT = 2400  # characters, the last ones of the lines


def _paragraph(lines: list[str], start: int) -> str:
    return "".join(lines[start : start + ANSWER_LINES])


def choice_item(scorer: Scorer, text: ModelText, document: HeldOut, rng: random.Random) -> Item | None:
    """One question from a document, or None where it is too short; wrong answers come from elsewhere in the same file.

    A choice's score is its log probability per byte. A token that spans the end of the prompt counts as the choice's.
    """
    lines = document.text.splitlines(keepends=True)
    places = [i for i in range(PROMPT_LINES, len(lines) - ANSWER_LINES) if len(_paragraph(lines, i).strip()) >= 24]
    if len(places) < 4 * CHOICES:
        return None
    right = rng.choice(places)
    wrong = rng.sample([i for i in places if abs(i - right) > ANSWER_LINES], CHOICES - 1)
    prompt = "".join(lines[right - PROMPT_LINES : right])[-LONGEST_PROMPT:]
    answers = [_paragraph(lines, place) for place in [right, *wrong]]
    made = scorer.score_many([[text.bos, *text.encode(prompt + answer)] for answer in answers])
    scores = []
    for answer, scored in zip(answers, made, strict=True):
        offsets = text.offsets(prompt + answer)
        chosen = [p for p, (_, end) in zip(scored.logprobs, offsets, strict=True) if end > len(prompt)]
        scores.append(sum(chosen) / len(answer.encode()))
    return Item(float(scores[0] > max(scores[1:])), 1)


def multiple_choice(
    scorer: Scorer, text: ModelText, documents: Sequence[HeldOut], kind: Kind, questions: int
) -> Figure:
    """`choice.<kind>.accuracy` over `questions` questions, one of each document in turn; chance is one in four."""
    items: list[Item] = []
    for turn in itertools.count():
        before = len(items)
        for n, document in enumerate(documents):
            if len(items) == questions:
                break
            item = choice_item(scorer, text, document, random.Random(f"choice/{kind}/{turn}/{n}"))
            if item is not None:
                items.append(item)
        if len(items) in (before, questions):
            break
    return estimate(f"choice.{kind}.accuracy", items, "share", "higher")
