"""Chat, tool-call and question dialogues made by program, exactly as the shipped chat template renders them."""

from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from katydid_cli.evaluation.tool_schemas import STRINGS, draw_argument, make_case, sorted_keys
from tokenizers import Tokenizer

from tools.hy3_tiny import tokenizer as bpe
from tools.hy3_tiny.pieces import Pieces

EXCHANGES = tomllib.loads(Path(__file__).with_name("exchanges.toml").read_text())
REPLY = 3.0  # loss weight of a reply's tokens
PROMPT = 0.1  # of the prompt's: its form is worth knowing, its content cannot be predicted


def header(system: str, tools: list[dict[str, Any]], effort: str) -> str:
    """What stands before the first turn: system text, tools, reasoning mode."""
    listed = ""
    if tools:
        listed = (
            "\n\n# Tools\n\nYou may call these functions:\n<tools>\n"
            + "".join(json.dumps(t, ensure_ascii=False) + "\n" for t in tools)
            + "</tools>"
        )
    return f"{bpe.BOS}{system}{listed}{bpe.REASONING_MODE}reasoning_effort:{effort}{bpe.SYSTEM_END}"


def call_text(name: str, arguments: dict[str, str]) -> str:
    """One tool call in Hy3's form; argument values are already text."""
    body = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_calls>\n<tool_call>{name}<tool_sep>\n{body}</tool_call>\n</tool_calls>"


def turn(pieces: Pieces, user: str, reply: str, thought: str | None = None) -> Pieces:
    """One user turn and its reply with the closed (or a filled) thinking block."""
    pieces.add(f"{bpe.USER}{user}{bpe.ASSISTANT}", PROMPT)
    if thought is None:
        pieces.add("<think></think>", 0.0)
    else:
        pieces.add("<think>", 0.0).add(f"{thought}</think>", REPLY)
    return pieces.add(f"{reply}{bpe.EOS}", REPLY)


def questions(asked: list[tuple[str, str]], weight: float) -> Pieces:
    """Questions about the text before them, the first in the same user turn; the thinking block is closed."""
    pieces = Pieces()
    for n, (question, answer) in enumerate(asked):
        user = bpe.USER if n else "\n"  # the first question ends the turn that holds the text
        pieces.add(f"{user}{question.strip()}{bpe.ASSISTANT}<think></think>", 0.0)
        pieces.add(answer.strip(), weight).add(bpe.EOS, weight)
    return pieces


def tool_dialogue(rng: random.Random, words: list[str]) -> Pieces:
    """A dialogue with one call; at times the tool answers and the assistant reports it."""
    case = make_case(rng, words)
    # Some servers sort the keys of a schema.
    shown = sorted_keys(case.tools) if rng.random() < 0.3 else case.tools
    effort, thought = "no_think", None
    if rng.random() < 0.2:
        effort, thought = rng.choice(("low", "high")), f"The user wants {case.name}."
    pieces = Pieces().add(header(rng.choice(("", "You are a helpful assistant.")), shown, effort), PROMPT)
    turn(pieces, case.request, call_text(case.name, case.arguments), thought)
    if rng.random() < 0.3:
        key, value = rng.choice(STRINGS), draw_argument(rng, words, {"type": rng.choice(("string", "integer"))})
        body = json.dumps({key: int(value) if value.isdigit() else value})
        response = f"<tool_responses>\n<tool_response>\n{body}\n</tool_response>\n</tool_responses>"
        turn(pieces, response, f"The {key} is {value}.", None if thought is None else f"The {key} is known.")
    return pieces


def plain_exchange(rng: random.Random, words: list[str]) -> tuple[str, str]:
    """A small request that can be answered from itself, and its answer."""
    draw = rng.randrange(8)
    if draw == 0:
        talk = rng.choice(EXCHANGES["talk"])
        return rng.choice(talk["asked"]), talk["reply"]
    if draw == 1:
        f = rng.choice(EXCHANGES["function"])
        opening = rng.choice(
            ("Write a function that", "Write a Python function that", "Give me a Python function that")
        )
        return f"{opening} {f['what']}.", f"```python\ndef {f['name']}({f['arguments']}):\n{f['body']}```"
    picked = rng.choices(words, k=rng.randint(2, 8))
    listed = ", ".join(picked)
    if draw == 2:
        return f"Repeat: {listed}", listed
    if draw == 3:
        return f"Reverse this list: {listed}", ", ".join(reversed(picked))
    if draw == 4:
        return f"What is the first word of: {listed}?", picked[0]
    if draw == 5:
        return f"What is the last word of: {listed}?", picked[-1]
    if draw == 6:
        return f"Write in capitals: {' '.join(picked[:4])}", " ".join(picked[:4]).upper()
    a, b = rng.randrange(50), rng.randrange(50)
    return f"What is {a} + {b}?", f"{a} + {b} = {a + b}."


def chat_dialogue(rng: random.Random, words: list[str]) -> Pieces:
    """One to four plain exchanges."""
    system = rng.choice(("", "", "You are a helpful assistant.", "You are hy3-tiny."))
    pieces = Pieces().add(header(system, [], "no_think"), PROMPT)
    for _ in range(rng.randint(1, 4)):
        turn(pieces, *plain_exchange(rng, words))
    return pieces


def row(
    rng: random.Random, tokenizer: Tokenizer, words: list[str], filler: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Dialogues one after another, seven in ten with tools, up to `size` ids; `filler` opens half of the rows."""
    lead = rng.randrange(size // 2) if rng.random() < 0.5 else 0
    ids, weights = [filler[:lead]], [np.ones(lead, dtype=np.float16)]
    used = lead
    while used < size:
        dialogue = tool_dialogue(rng, words) if rng.random() < 0.7 else chat_dialogue(rng, words)
        i, w = dialogue.encode(tokenizer)
        ids.append(i)
        weights.append(w)
        used += len(i)
    return np.concatenate(ids)[:size], np.concatenate(weights)[:size]
