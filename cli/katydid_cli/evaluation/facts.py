"""Key-value facts for long-range recall: how they are stated, asked and answered.

The training data of hy3-tiny and the recall task share these forms; their words do not overlap.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

FORMS = 4


@dataclass(frozen=True)
class Fact:
    """One key and value: `statement` is a whole line, `answer` follows `question` directly."""

    statement: str
    question: str
    answer: str


def make_fact(form: int, key: tuple[str, str], value: str) -> Fact:
    """The fact as prose (0), record (1), assignment (2) or comment (3); raises ValueError for another form."""
    a, b = key
    if form == 0:
        question = f"Question: What is the code of the {a} {b}?\nAnswer:"
        return Fact(f"The code of the {a} {b} is {value}.\n", question, f" {value}")
    if form == 1:
        return Fact(f"[record] {a} {b}: {value}\n", f"[lookup] {a} {b}:", f" {value}")
    if form == 2:
        quoted = value if value.isdigit() else f'"{value}"'
        return Fact(f"{a}_{b} = {quoted}\n", f">>> {a}_{b}\n", quoted)
    if form == 3:
        return Fact(f"# Note: the password for {a}-{b} is {value}.\n", f"# The password for {a}-{b} is", f" {value}")
    raise ValueError(f"form is {form}, allowed are 0 to {FORMS - 1}")


def draw_value(rng: random.Random, words: Sequence[str]) -> str:
    """Five digits three times in four, else two words."""
    if rng.random() < 0.75:
        return "".join(rng.choices("0123456789", k=5))
    return " ".join(rng.choices(words, k=2))


def draw_keys(rng: random.Random, words: Sequence[str], count: int) -> list[tuple[str, str]]:
    """Distinct pairs of words; some pairs share a word, so that half a key is not enough.

    Raises ValueError when `words` are too few to give `count` pairs.
    """
    pool = rng.sample(words, min(len(words), max(4, int(count * rng.uniform(0.6, 2.0)) + 2)))
    if count > len(pool) ** 2 // 2:
        raise ValueError(f"{len(words)} words give too few pairs for {count} keys")
    keys: dict[tuple[str, str], None] = {}
    while len(keys) < count:
        keys[(rng.choice(pool), rng.choice(pool))] = None
    return list(keys)
