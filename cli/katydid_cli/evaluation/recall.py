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


def filler_lines(text: ModelText, documents: Sequence[HeldOut], rng: random.Random, tokens: int) -> list[str]:
    """About `tokens` tokens of held-out lines, from a random place on."""
    start = rng.randrange(len(documents))
    body = "".join(d.text.rstrip("\n") + "\n" for d in [*documents[start:], *documents[:start]])
    lines = body[: tokens * 8].splitlines(keepends=True)
    lines = lines[rng.randrange(max(1, len(lines) // 4)) :]
    offsets = text.offsets("".join(lines))
    kept = "".join(lines)[: offsets[tokens][0] if tokens < len(offsets) else None]
    return kept.splitlines(keepends=True)[:-1]


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
    statements = [f.statement for f in facts]
    tail = "\n" + "".join(f"{f.question}{f.answer}\n" for f in asked)
    lines = filler_lines(text, documents, rng, length - len(text.encode("".join(statements) + tail)))
    while True:
        places = sorted(rng.choices(range(len(lines) + 1), k=count), reverse=True)
        body = list(lines)
        for statement, place in zip(statements, places, strict=True):
            body.insert(place, statement)
        whole = "".join(body) + tail
        ids = [text.bos, *text.encode(whole)]
        if len(ids) < length:
            break
        lines = lines[: -max(1, (len(ids) - length) // 16)]
    greedy = scorer.score(ids).greedy
    offsets = text.offsets(whole)
    right = 0
    at = len(whole) - len(tail) + 1
    for fact in asked:
        at += len(fact.question)
        answer = [i for i, (start, _) in enumerate(offsets) if at <= start < at + len(fact.answer)]
        # ids[i + 1] is token i of the text, and greedy[i] speaks of it.
        right += all(greedy[i] for i in answer)
        at += len(fact.answer) + 1
    return Item(right, len(asked))


def recall(scorer: Scorer, text: ModelText, documents: Sequence[HeldOut], length: int, contexts: int) -> Figure:
    """`recall.<length>.accuracy` over `contexts` contexts."""
    items = [context_item(scorer, text, documents, length, f"recall/{length}/{i}") for i in range(contexts)]
    return estimate(f"recall.{length // 1024}k.accuracy", items, "share", "higher")
