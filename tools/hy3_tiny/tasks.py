"""Generated long-range tasks: key-value recall, dense dictionaries, copying and variable tracking, woven into real text.

A task is a list of pieces (text or token ids, each with a loss weight). Statements of random keys and values weigh
nothing, since nobody can predict them; answers weigh much; filler weighs one and trains language modelling.
Pieces begin and end where the tokenizer's own cuts fall (line breaks, before a space), so that ids made piece by
piece equal ids made from the whole text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from tools.hy3_tiny import dialogues
from tools.hy3_tiny.pieces import Pieces

ANSWER = 5.0  # loss weight of an answer token
GIVEN = 0.0
FILLER = 1.0


@dataclass(frozen=True)
class Fact:
    """One key and its value, stated as `statement`, asked as `question`, answered by `answer` (which starts at a cut)."""

    statement: str
    question: str
    answer: str


def value_of(rng: np.random.Generator, words: list[str]) -> str:
    """Five digits mostly, else two words."""
    if rng.random() < 0.75:
        return "".join(str(d) for d in rng.integers(0, 10, 5))
    return " ".join(words[i] for i in rng.integers(0, len(words), 2))


def fact(rng: np.random.Generator, key: tuple[str, str], value: str, form: int) -> Fact:
    """The fact in one of four forms: prose, record, assignment, comment."""
    del rng
    a, b = key
    if form == 0:
        return Fact(f"The code of the {a} {b} is {value}.\n", f"Question: What is the code of the {a} {b}?\nAnswer:", f" {value}")
    if form == 1:
        return Fact(f"[record] {a} {b}: {value}\n", f"[lookup] {a} {b}:", f" {value}")
    if form == 2:
        quoted = value if value.isdigit() else f'"{value}"'
        return Fact(f"{a}_{b} = {quoted}\n", f">>> {a}_{b}\n", quoted)
    return Fact(f"# Note: the password for {a}-{b} is {value}.\n", f"# The password for {a}-{b} is", f" {value}")


def distinct_keys(rng: np.random.Generator, words: list[str], count: int) -> list[tuple[str, str]]:
    """Distinct pairs of words; some pairs share a word, so that half a key is not enough."""
    pool = rng.choice(len(words), size=min(len(words), max(4, int(count * rng.uniform(0.6, 2.0)) + 2)), replace=False)
    keys: dict[tuple[str, str], None] = {}
    while len(keys) < count:
        a, b = rng.integers(0, len(pool), 2)
        keys[(words[pool[a]], words[pool[b]])] = None
    return list(keys)


def recall(rng: np.random.Generator, words: list[str], size: int) -> tuple[list[Pieces], Pieces]:
    """Needles to scatter in filler, and the questions for the end; one fact per 48 to 512 tokens of context."""
    count = int(np.clip(size / rng.choice([48, 64, 96, 128, 256, 512]), 2, 160))
    asked = int(np.clip(count, 2, 48 if size > 4096 else 24))
    forms = [int(rng.integers(0, 4))] * count if rng.random() < 0.6 else list(rng.integers(0, 4, count))
    facts = [
        fact(rng, key, value_of(rng, words), int(form)) for key, form in zip(distinct_keys(rng, words, count), forms, strict=True)
    ]
    order = rng.permutation(count)[:asked]
    if rng.random() < 0.35:
        return [Pieces().add(f.statement, GIVEN) for f in facts], dialogues.questions([(facts[i].question, facts[i].answer) for i in order], ANSWER)
    questions = Pieces().add("\n", FILLER)
    for i in order:
        questions.add(facts[i].question, GIVEN).add(facts[i].answer, ANSWER).add("\n", FILLER)
    return [Pieces().add(f.statement, GIVEN) for f in facts], questions


def variables(rng: np.random.Generator, words: list[str], size: int) -> tuple[list[Pieces], Pieces]:
    """Chains of assignments (one value passed through up to three names) scattered in filler, then questions."""
    chains = int(np.clip(size / rng.choice([128, 256, 512]), 2, 24))
    names = [f"{a}_{b}" for a, b in distinct_keys(rng, words, chains * 4)]
    pending = []
    ask = []
    for c in range(chains):
        hops = int(rng.integers(1, 4))
        value = "".join(str(d) for d in rng.integers(0, 10, 4))
        chain = names[c * 4 : c * 4 + hops]
        lines = [f"{chain[0]} = {value}\n"] + [f"{new} = {old}\n" for old, new in zip(chain, chain[1:], strict=False)]
        pending.append(lines)
        ask.append((f">>> {chain[int(rng.integers(0, hops))]}\n", value))
    statements = []
    while any(pending):
        live = [lines for lines in pending if lines]
        statements.append(Pieces().add(live[int(rng.integers(0, len(live)))].pop(0), GIVEN))
    questions = Pieces().add("\n", FILLER)
    for i in rng.permutation(chains):
        questions.add(ask[i][0], GIVEN).add(ask[i][1], ANSWER).add("\n", FILLER)
    return statements, questions


def dictionary(rng: np.random.Generator, words: list[str], size: int) -> tuple[list[Pieces], Pieces]:
    """One literal dictionary filling a third to all of the context, then look-ups in random order."""
    count = int(np.clip(size * rng.uniform(0.3, 0.75) / 20, 3, 700))
    asked = int(np.clip(count, 3, 64 if size > 4096 else 32))
    keys = distinct_keys(rng, words, count)
    values = ["".join(str(d) for d in rng.integers(0, 10, 5)) for _ in keys]
    name = words[int(rng.integers(0, len(words)))]
    body = f"{name} = {{\n" + "".join(f'    "{a}_{b}": {v},\n' for (a, b), v in zip(keys, values, strict=True)) + "}\n"
    questions = Pieces().add("\n", FILLER)
    for i in rng.permutation(count)[:asked]:
        a, b = keys[i]
        questions.add(f'>>> {name}["{a}_{b}"]\n', GIVEN).add(values[i], ANSWER).add("\n", FILLER)
    return [Pieces().add(body, GIVEN)], questions


def scatter(
    rng: np.random.Generator, tokenizer: Tokenizer, statements: list[Pieces], questions: Pieces, filler: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Statements at random line breaks of the filler, questions at the end; None where they do not fit into `size`."""
    encoded = [s.encode(tokenizer) for s in statements]
    end_ids, end_weights = questions.encode(tokenizer)
    room = size - len(end_ids) - sum(len(i) for i, _ in encoded)
    if room < 0:
        return None
    body = filler[:room]
    breaks = np.flatnonzero(body == tokenizer.token_to_id("Ċ")) + 1
    if len(breaks) == 0:
        breaks = np.arange(room + 1)
    places = np.sort(rng.choice(breaks, size=len(encoded), replace=len(breaks) < len(encoded)))
    ids, weights, last = [], [], 0
    for place, (i, w) in zip(places, encoded, strict=True):
        ids += [body[last:place], i]
        weights += [np.full(place - last, FILLER, dtype=np.float16), w]
        last = place
    ids += [body[last:], end_ids]
    weights += [np.full(room - last, FILLER, dtype=np.float16), end_weights]
    return np.concatenate(ids), np.concatenate(weights)


def copy_row(rng: np.random.Generator, tokenizer: Tokenizer, words: list[str], filler: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """`[begin] X [repeat] X`: X is real text or random words, and the second X may be far from the first."""
    length = int(rng.integers(16, min(size // 2 - 32, 1024)))
    if rng.random() < 0.5:
        content = filler[:length]
    else:
        picked = " ".join(words[i] for i in rng.integers(0, len(words), length))
        content = np.asarray(tokenizer.encode(picked, add_special_tokens=False).ids[:length], dtype=np.uint16)
    begin = np.asarray(tokenizer.encode("\n[begin]\n", add_special_tokens=False).ids, dtype=np.uint16)
    repeat = np.asarray(tokenizer.encode("\n[repeat]\n", add_special_tokens=False).ids, dtype=np.uint16)
    spare = size - 2 * len(content) - len(begin) - len(repeat)
    before = int(rng.integers(0, spare + 1))
    between = filler[length : length + spare - before]
    lead = filler[len(filler) - before :] if before else filler[:0]
    ids = np.concatenate((lead, begin, content, between, repeat, content))[:size]
    weights = np.ones(len(ids), dtype=np.float16)
    weights[len(lead) : len(lead) + len(begin) + len(content)] = GIVEN
    weights[len(ids) - len(content) - len(repeat) : len(ids) - len(content)] = GIVEN
    return ids, weights


def row(rng: np.random.Generator, tokenizer: Tokenizer, words: list[str], filler: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """One row of exactly `size` ids with weights: a task drawn at random, filled up with `filler` (size ids at least)."""
    draw = rng.random()
    if draw < 0.12:
        made: tuple[np.ndarray, np.ndarray] | None = copy_row(rng, tokenizer, words, filler, size)
    elif draw < (0.55 if size <= 4098 else 0.1):
        made = dialogues.row(rng, tokenizer, words, filler, size)
    else:
        kind = recall if draw < 0.8 else dictionary if draw < 0.92 else variables
        made = scatter(rng, tokenizer, *kind(rng, words, size), filler, size)
    if made is None:
        return filler[:size], np.ones(size, dtype=np.float16)
    ids, weights = made
    if len(ids) < size:
        ids = np.concatenate((filler[: size - len(ids)], ids))
        weights = np.concatenate((np.ones(size - len(weights), dtype=np.float16), weights))
    # The first target of a row has no context at all.
    return ids[:size], weights[:size]
