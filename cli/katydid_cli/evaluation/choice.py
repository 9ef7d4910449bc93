"""Multiple choice by likelihood: which of four continuations of a held-out file is the real one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from katydid_cli.evaluation.figures import Figure, Item, estimate
from katydid_cli.evaluation.held_out import HeldOut, Kind
from katydid_cli.evaluation.scorer import Scorer
from katydid_cli.evaluation.text import ModelText

CHOICES = 4
PROMPT_LINES = 24
ANSWER_LINES = 2
LONGEST_PROMPT = 2400  # characters, the last ones of the lines


def _paragraph(lines: Sequence[str], start: int) -> str:
    return "".join(lines[start : start + ANSWER_LINES])


@dataclass(frozen=True)
class Question:
    """Four continuations of a prompt, the real one first.

    Attributes:
        ids: of each, with the prompt's.
        scored: places in ``ids`` of the tokens that are the choice's, less one: what a scorer's log probabilities
            speak of. A token that spans the end of the prompt counts.
        sizes: bytes of each choice.
    """

    ids: list[list[int]]
    scored: list[list[int]]
    sizes: list[int]


def places(lines: Sequence[str]) -> list[int]:
    """Lines of a document whose continuation may be asked for; none where it is too short."""
    found = [i for i in range(PROMPT_LINES, len(lines) - ANSWER_LINES) if len(_paragraph(lines, i).strip()) >= 24]
    return found if len(found) >= 4 * CHOICES else []


def question(text: ModelText, lines: Sequence[str], right: int, wrong: Sequence[int]) -> Question:
    """Whether a document goes on with its line ``right`` or with one of the lines ``wrong``."""
    prompt = "".join(lines[right - PROMPT_LINES : right])[-LONGEST_PROMPT:]
    asked = Question([], [], [])
    for place in (right, *wrong):
        answer = _paragraph(lines, place)
        offsets = text.offsets(prompt + answer)
        asked.ids.append([text.bos, *text.encode(prompt + answer)])
        asked.scored.append([i for i, (_, end) in enumerate(offsets) if end > len(prompt)])
        asked.sizes.append(len(answer.encode()))
    return asked


def choice_item(scorer: Scorer, asked: Question) -> Item:
    """Whether the real continuation is the likeliest; a choice's score is its log probability per byte."""
    made = scorer.score_many(asked.ids)
    scores = [
        sum(answer.logprobs[i] for i in scored) / size
        for answer, scored, size in zip(made, asked.scored, asked.sizes, strict=True)
    ]
    return Item(float(scores[0] > max(scores[1:])), 1)


def questions(text: ModelText, documents: Sequence[HeldOut], kind: Kind) -> Iterator[Question]:
    """One of each document in turn, every place of a document once; wrong answers come from elsewhere in the same."""
    split = [document.text.splitlines(keepends=True) for document in documents]
    found = [places(lines) for lines in split]
    orders = [random.Random(f"choice/{kind}/{n}").sample(one, len(one)) for n, one in enumerate(found)]
    for turn in range(max(map(len, orders), default=0)):
        for n, order in enumerate(orders):
            if turn < len(order):
                right, rng = order[turn], random.Random(f"choice/{kind}/{turn}/{n}")
                elsewhere = [i for i in found[n] if abs(i - right) > ANSWER_LINES]
                yield question(text, split[n], right, rng.sample(elsewhere, CHOICES - 1))


def multiple_choice(scorer: Scorer, text: ModelText, documents: Sequence[HeldOut], kind: Kind, count: int) -> Figure:
    """`choice.<kind>.accuracy` over `count` questions, fewer where no more can be asked; chance is one in four."""
    asked = itertools.islice(questions(text, documents, kind), count)
    return estimate(f"choice.{kind}.accuracy", [choice_item(scorer, one) for one in asked], "share", "higher")
