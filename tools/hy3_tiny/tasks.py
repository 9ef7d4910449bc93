"""Generated long-range tasks woven into real text: key-value recall, dictionaries, copying, variable tracking.

Statements of random keys and values weigh nothing in the loss, since nobody can predict them; answers weigh much;
filler weighs one and trains language modelling. Pieces begin and end where the tokenizer's own cuts fall (line breaks,
before a space), so that ids made piece by piece equal ids made from the whole text.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
from katydid_cli.evaluation.facts import FORMS, draw_keys, draw_value, make_fact
from tokenizers import Tokenizer

from tools.hy3_tiny import dialogues
from tools.hy3_tiny.pieces import Pieces
from tools.hy3_tiny.tokenizer import USER

ANSWER = 5.0  # loss weight of an answer token
GIVEN = 0.0
FILLER = 1.0
SPREADS = (48, 64, 96, 128, 256, 512)  # tokens of context per fact

Row = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Task:
    """What opens the context, what is scattered in it, and the questions at its end."""

    statements: list[Pieces]
    questions: Pieces
    opening: Pieces | None = None


def recall(rng: random.Random, words: list[str], size: int, *, every: bool = False) -> Task:
    """Facts to scatter in filler, and the questions for the end, plain or as the turns of a chat about the context;
    for ``every`` fact, or for as many as rows of the training have."""
    count = min(max(size // rng.choice(SPREADS), 2), 160)
    asked = count if every else min(count, 48 if size > 4098 else 24)
    form = rng.randrange(FORMS) if rng.random() < 0.6 else None
    facts = [
        make_fact(rng.randrange(FORMS) if form is None else form, key, draw_value(rng, words))
        for key in draw_keys(rng, words, count)
    ]
    statements = [Pieces().add(f.statement, GIVEN) for f in facts]
    chosen = rng.sample(facts, asked)
    if rng.random() < 0.35:
        opening = Pieces().add(dialogues.header("", [], "no_think") + USER, GIVEN)
        return Task(statements, dialogues.questions([(f.question, f.answer) for f in chosen], ANSWER), opening)
    return Task(statements, _plain_questions([(f.question, f.answer) for f in chosen]))


def _plain_questions(asked: list[tuple[str, str]]) -> Pieces:
    questions = Pieces().add("\n", FILLER)
    for question, answer in asked:
        questions.add(question, GIVEN).add(answer, ANSWER).add("\n", FILLER)
    return questions


def variables(rng: random.Random, words: list[str], size: int) -> Task:
    """Chains of assignments (one value passed through up to three names) scattered in filler, then questions."""
    chains = min(max(size // rng.choice((128, 256, 512)), 2), 24)
    names = [f"{a}_{b}" for a, b in draw_keys(rng, words, chains * 3)]
    pending: list[list[str]] = []
    asked = []
    for c in range(chains):
        chain = names[c * 3 : c * 3 + rng.randint(1, 3)]
        value = "".join(rng.choices("0123456789", k=4))
        pending.append([f"{chain[0]} = {value}\n"] + [f"{new} = {old}\n" for old, new in itertools.pairwise(chain)])
        asked.append((f">>> {rng.choice(chain)}\n", value))
    statements = []
    while any(pending):
        statements.append(Pieces().add(rng.choice([lines for lines in pending if lines]).pop(0), GIVEN))
    rng.shuffle(asked)
    return Task(statements, _plain_questions(asked))


def dictionary(rng: random.Random, words: list[str], size: int) -> Task:
    """One literal dictionary that fills a third to three quarters of the context, then look-ups in random order."""
    count = min(max(int(size * rng.uniform(0.3, 0.75) / 20), 3), 700)
    entries = [(f"{a}_{b}", "".join(rng.choices("0123456789", k=5))) for a, b in draw_keys(rng, words, count)]
    name = rng.choice(words)
    body = f"{name} = {{\n" + "".join(f'    "{k}": {v},\n' for k, v in entries) + "}\n"
    chosen = rng.sample(entries, min(count, 64 if size > 4098 else 32))
    return Task([Pieces().add(body, GIVEN)], _plain_questions([(f'>>> {name}["{k}"]\n', v) for k, v in chosen]))


def scatter(rng: random.Random, tokenizer: Tokenizer, task: Task, filler: np.ndarray, size: int) -> Row | None:
    """Statements at random line breaks of the filler, questions at the end; None where they do not fit into `size`."""
    encoded = [s.encode(tokenizer) for s in task.statements]
    end_ids, end_weights = task.questions.encode(tokenizer)
    if task.opening is not None:
        encoded.insert(0, task.opening.encode(tokenizer))
    room = size - len(end_ids) - sum(len(i) for i, _ in encoded)
    if room < 0:
        return None
    body = filler[:room]
    breaks = (np.flatnonzero(body == tokenizer.token_to_id("Ċ")) + 1).tolist() or list(range(room + 1))
    ids, weights, last = [], [], 0
    places = sorted(rng.choices(breaks, k=len(encoded)))
    if task.opening is not None:
        places[0] = 0
    for place, (i, w) in zip(places, encoded, strict=True):
        ids += [body[last:place], i]
        weights += [np.full(place - last, FILLER, dtype=np.float16), w]
        last = place
    ids += [body[last:], end_ids]
    weights += [np.full(room - last, FILLER, dtype=np.float16), end_weights]
    return np.concatenate(ids), np.concatenate(weights)


def copying(rng: random.Random, tokenizer: Tokenizer, words: list[str], filler: np.ndarray, size: int) -> Row:
    """`[begin] X [repeat] X`: X is real text or random words, and the second X may be far from the first."""
    length = rng.randrange(16, min(size // 2 - 32, 1024))
    content = filler[:length]
    if rng.random() < 0.5:
        content = _encode(tokenizer, " ".join(rng.choices(words, k=length)))[:length]
    begin, repeat = _encode(tokenizer, "\n[begin]\n"), _encode(tokenizer, "\n[repeat]\n")
    spare = size - 2 * len(content) - len(begin) - len(repeat)
    before = rng.randint(0, spare)
    lead, between = filler[len(filler) - before :], filler[length : length + spare - before]
    parts = [(lead, FILLER), (begin, GIVEN), (content, GIVEN), (between, FILLER), (repeat, GIVEN), (content, FILLER)]
    return np.concatenate([p for p, _ in parts]), np.concatenate(
        [np.full(len(p), w, dtype=np.float16) for p, w in parts]
    )


def _encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint16)


def row(rng: random.Random, tokenizer: Tokenizer, words: list[str], filler: np.ndarray, size: int) -> Row:
    """One row of exactly `size` ids with weights: a task drawn at random, filled up with `filler` (>= `size` ids)."""
    draw = rng.random()
    made: Row | None
    if draw < 0.1:
        made = copying(rng, tokenizer, words, filler, size)
    elif draw < (0.5 if size <= 4098 else 0.12):
        made = dialogues.row(rng, tokenizer, words, filler, size)
    else:
        kind = recall if draw < 0.8 else dictionary if draw < 0.9 else variables
        made = scatter(rng, tokenizer, kind(rng, words, size), filler, size)
    if made is None:
        return filler[:size], np.ones(size, dtype=np.float16)
    ids, weights = made
    if len(ids) < size:
        ids = np.concatenate((filler[: size - len(ids)], ids))
        weights = np.concatenate((np.ones(size - len(weights), dtype=np.float16), weights))
    return ids[:size], weights[:size]
