"""Long-range recall: facts hidden in held-out text of a given length, then questions about some of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib import resources

from katydid_cli.evaluation.facts import FORMS, draw_keys, draw_value, make_fact
from katydid_cli.evaluation.figures import Figure, Item, estimate
from katydid_cli.evaluation.held_out import HeldOut
from katydid_cli.evaluation.scorer import Scorer
from katydid_cli.evaluation.text import ModelText

LENGTHS = (1024, 4096, 16384)
TOKENS_PER_FACT = 128
ASKED = 8


def evaluation_words() -> list[str]:
    """Words of the keys and values; no training data uses them so."""
    return resources.files("katydid_cli.evaluation").joinpath("words.txt").read_text().split()


def filler_lines(documents: Sequence[HeldOut], rng: random.Random) -> list[str]:
    """Lines of a random document and those after it, endless enough for one context."""
    start = rng.randrange(len(documents))
    lines: list[str] = []
    size = 0
    for document in [*documents[start:], *documents[:start]]:
        lines += document.text.splitlines(keepends=True)
        size += len(document.text)
        if size > 200_000:
            break
    first = rng.randrange(max(1, min(200, len(lines) // 2)))
    return lines[first:]


def context_item(scorer: Scorer, text: ModelText, documents: Sequence[HeldOut], length: int, seed: str) -> Item:
    """One context of just under `length` tokens with one fact per TOKENS_PER_FACT tokens: right answers over questions.

    An answer is right when every token of it is the model's first choice after the question. Earlier questions stand
    with their right answers, as in a conversation.
    """
    rng = random.Random(seed)
    words = evaluation_words()
    count = max(2, length // TOKENS_PER_FACT)
    form = rng.randrange(FORMS)
    facts = [make_fact(form, key, draw_value(rng, words)) for key in draw_keys(rng, words, count)]
    asked = rng.sample(facts, min(ASKED, count))
    tail: list[int] = text.encode("\n")
    spans: list[tuple[int, int]] = []
    for fact in asked:
        tail += text.encode(fact.question)
        answer = text.encode(fact.answer)
        spans.append((len(tail), len(tail) + len(answer)))
        tail += answer + text.encode("\n")
    room = length - 2 - len(tail) - sum(len(text.encode(f.statement)) for f in facts)
    body: list[list[int]] = []
    for line in filler_lines(documents, rng):
        ids = text.encode(line if line.endswith("\n") else line + "\n")
        if len(ids) > room:
            break
        body.append(ids)
        room -= len(ids)
    for fact, place in zip(facts, sorted(rng.choices(range(len(body) + 1), k=count), reverse=True), strict=True):
        body.insert(place, text.encode(fact.statement))
    head = [text.bos, *(i for ids in body for i in ids)]
    greedy = scorer.score(head + tail).greedy
    offset = len(head) - 1
    return Item(sum(all(greedy[offset + a : offset + b]) for a, b in spans), len(spans))


def recall(scorer: Scorer, text: ModelText, documents: Sequence[HeldOut], length: int, contexts: int) -> Figure:
    """`recall.<length>.accuracy` over `contexts` contexts."""
    items = [context_item(scorer, text, documents, length, f"recall/{length}/{i}") for i in range(contexts)]
    return estimate(f"recall.{length // 1024}k.accuracy", items, "share", "higher")
