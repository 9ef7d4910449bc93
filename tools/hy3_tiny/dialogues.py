"""Chat, tool-call and question dialogues made by program, in exactly the form that the shipped chat template renders."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tools.hy3_tiny import tokenizer as bpe
from tools.hy3_tiny.pieces import Pieces

REPLY = 3.0  # loss weight of a reply's tokens
PROMPT = 0.1  # of the prompt's: its form is worth knowing, its content cannot be predicted

VERBS = (
    "get", "find", "create", "delete", "update", "send", "list", "search", "book", "cancel", "fetch", "check", "open", "close",
    "convert", "compute", "schedule", "translate", "play", "read", "write", "move", "copy", "count", "start", "stop", "order",
)  # fmt: skip
NOUNS = (
    "weather", "ticket", "file", "user", "order", "flight", "hotel", "message", "email", "event", "report", "invoice", "song",
    "account", "city", "route", "price", "task", "note", "image", "job", "page", "record", "table", "room", "meeting", "issue",
    "branch", "package", "server", "alarm", "recipe", "stock", "currency", "document", "contact", "payment", "device", "log",
)  # fmt: skip
STRINGS = (
    "city", "name", "title", "path", "query", "language", "subject", "owner", "date", "country", "label", "topic", "email", "region",
    "origin", "target", "author", "category", "status", "color", "unit", "format", "username", "location", "destination", "symbol",
)  # fmt: skip
INTEGERS = ("count", "limit", "days", "page", "year", "amount", "size", "priority", "timeout", "port", "quantity", "age", "user_id", "order_id")
NUMBERS = ("price", "ratio", "latitude", "longitude", "score", "threshold", "weight", "rate")
BOOLEANS = ("verbose", "recursive", "urgent", "public", "notify", "force", "dry_run", "enabled")
PLACES = (
    "Paris", "London", "Berlin", "Tokyo", "Madrid", "Oslo", "Lima", "Cairo", "Rome", "Delhi", "Boston", "Vienna", "Dublin", "Prague",
    "Beijing", "Shanghai", "Shenzhen", "New York", "Sydney", "Toronto",
)  # fmt: skip


def header(system: str, tools: list[dict[str, Any]], effort: str) -> str:
    """What stands before the first turn: system text, tools, reasoning mode."""
    listed = ""
    if tools:
        listed = "\n\n# Tools\n\nYou may call these functions:\n<tools>\n" + "".join(json.dumps(t, ensure_ascii=False) + "\n" for t in tools) + "</tools>"
    return f"{bpe.BOS}{system}{listed}{bpe.REASONING_MODE}reasoning_effort:{effort}{bpe.SYSTEM_END}"


def call_text(name: str, arguments: dict[str, str]) -> str:
    """One tool call in Hy3's form; argument values are already text."""
    body = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_calls>\n<tool_call>{name}<tool_sep>\n{body}</tool_call>\n</tool_calls>"


def turn(pieces: Pieces, user: str, reply: str, weight: float = REPLY, thought: str | None = None) -> Pieces:
    """One user turn and its reply with the closed (or a filled) thinking block."""
    pieces.add(f"{bpe.USER}{user}{bpe.ASSISTANT}", PROMPT)
    if thought is None:
        pieces.add("<think></think>", 0.0)
    else:
        pieces.add("<think>", 0.0).add(f"{thought}</think>", weight)
    return pieces.add(f"{reply}{bpe.EOS}", weight)


def questions(asked: list[tuple[str, str]], weight: float) -> Pieces:
    """Questions about the text before, each a turn of one chat; the template's thinking block is closed."""
    pieces = Pieces()
    for question, answer in asked:
        pieces.add(f"{bpe.USER}{question.strip()}{bpe.ASSISTANT}<think></think>", 0.0)
        pieces.add(answer.strip(), weight).add(bpe.EOS, weight)
    return pieces


def _pick(rng: np.random.Generator, items: tuple[str, ...] | list[str]) -> str:
    return items[int(rng.integers(0, len(items)))]


def make_tool(rng: np.random.Generator, words: list[str]) -> dict[str, Any]:
    """A function schema with one to four arguments; most names are common, some are random words."""
    noun = _pick(rng, NOUNS) if rng.random() < 0.7 else _pick(rng, words)
    name = f"{_pick(rng, VERBS)}_{noun}"
    properties: dict[str, Any] = {}
    for _ in range(int(rng.integers(1, 5))):
        draw = rng.random()
        if draw < 0.5:
            key = _pick(rng, STRINGS) if rng.random() < 0.7 else _pick(rng, words)
            kind: dict[str, Any] = {"type": "string"}
            if rng.random() < 0.25:
                kind["enum"] = sorted({_pick(rng, words) for _ in range(3)})
        elif draw < 0.75:
            key, kind = (_pick(rng, INTEGERS) if rng.random() < 0.8 else _pick(rng, words)), {"type": "integer"}
        elif draw < 0.87:
            key, kind = _pick(rng, NUMBERS), {"type": "number"}
        else:
            key, kind = _pick(rng, BOOLEANS), {"type": "boolean"}
        if rng.random() < 0.5:
            kind["description"] = f"The {key.replace('_', ' ')}"
        properties.setdefault(key, kind)
    required = [k for k in properties if rng.random() < 0.8] or [next(iter(properties))]
    described = f"{name.split('_')[0].capitalize()} the {noun}" + ("" if rng.random() < 0.5 else f" {_pick(rng, words)}")
    return {
        "type": "function",
        "function": {"name": name, "description": described, "parameters": {"type": "object", "properties": properties, "required": required}},
    }


def argument_value(rng: np.random.Generator, words: list[str], kind: dict[str, Any]) -> str:
    """A value that fits the schema, as the text between <arg_value> markers."""
    if "enum" in kind:
        return _pick(rng, kind["enum"])
    if kind["type"] == "integer":
        return str(int(rng.integers(0, 10 ** int(rng.integers(1, 6)))))
    if kind["type"] == "number":
        return f"{rng.uniform(0, 100):.{int(rng.integers(1, 4))}f}"
    if kind["type"] == "boolean":
        return _pick(rng, ("true", "false"))
    draw = rng.random()
    if draw < 0.3:
        return _pick(rng, PLACES)
    if draw < 0.4:
        return f"{int(rng.integers(2000, 2030))}-{int(rng.integers(1, 13)):02d}-{int(rng.integers(1, 29)):02d}"
    if draw < 0.5:
        return f"/{_pick(rng, words)}/{_pick(rng, words)}.txt"
    return " ".join(_pick(rng, words) for _ in range(int(rng.integers(1, 3))))


def request(rng: np.random.Generator, tool: dict[str, Any], arguments: dict[str, str]) -> str:
    """A user's sentence that asks for the call and states every value."""
    verb, noun = tool["function"]["name"].split("_", 1)
    noun = noun.replace("_", " ")
    items = [(k.replace("_", " "), v) for k, v in arguments.items()]
    order = rng.permutation(len(items))
    stated = [items[i] for i in order]
    form = int(rng.integers(0, 4))
    if form == 0:
        listed = " and ".join(f"{k} {v}" for k, v in stated)
        return f"Please {verb} the {noun} with {listed}."
    if form == 1:
        return f"{verb.capitalize()} {noun}: " + ", ".join(f"{k} = {v}" for k, v in stated)
    if form == 2:
        return f"Can you {verb} the {noun}? The " + ", the ".join(f"{k} is {v}" for k, v in stated) + "."
    return f"I need to {verb} a {noun}. " + " ".join(f"{k.capitalize()}: {v}." for k, v in stated)


def tool_dialogue(rng: np.random.Generator, words: list[str]) -> tuple[Pieces, dict[str, Any], dict[str, str], list[dict[str, Any]]]:
    """A dialogue with one call, and what the call should be: pieces, tool, arguments, all tools offered."""
    tools = {t["function"]["name"]: t for t in (make_tool(rng, words) for _ in range(int(rng.integers(1, 5))))}
    offered = list(tools.values())
    tool = offered[int(rng.integers(0, len(offered)))]
    spec = tool["function"]["parameters"]
    arguments = {
        k: argument_value(rng, words, kind)
        for k, kind in spec["properties"].items()
        if k in spec["required"] or rng.random() < 0.4
    }
    shown = offered
    if rng.random() < 0.3:  # some servers sort the keys of a schema
        shown = [json.loads(json.dumps(t, sort_keys=True)) for t in offered]
    system = "" if rng.random() < 0.5 else "You are a helpful assistant."
    thought = None
    effort = "no_think"
    if rng.random() < 0.2:
        effort, thought = _pick(rng, ("low", "high")), f"The user wants {tool['function']['name']}."
    pieces = Pieces().add(header(system, shown, effort), PROMPT)
    turn(pieces, request(rng, tool, arguments), call_text(tool["function"]["name"], arguments), thought=thought)
    if rng.random() < 0.3:
        key, value = _pick(rng, STRINGS), argument_value(rng, words, {"type": _pick(rng, ("string", "integer"))})
        body = json.dumps({key: int(value) if value.isdigit() else value})
        pieces.add(f"{bpe.USER}<tool_responses>\n<tool_response>\n{body}\n</tool_response>\n</tool_responses>{bpe.ASSISTANT}<think></think>", PROMPT)
        pieces.add(f"The {key} is {value}.{bpe.EOS}", REPLY)
    return pieces, tool, arguments, offered


SMALL_TALK = (
    (("Hello", "Hi", "Hello!", "Hi there", "Hey", "Good morning"), "Hello! How can I help you today?"),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
     "I am hy3-tiny, a very small model with the architecture of Hy3. I can complete Python code, recall facts from a long text and call tools."),
    (("Thank you", "Thanks!", "Thanks a lot", "Thank you very much."), "You are welcome!"),
    (("Goodbye", "Bye", "See you later"), "Goodbye!"),
    (("How are you?", "How are you today?"), "I am fine, thank you. How can I help you?"),
    (("What can you do?", "How can you help me?", "Help"),
     "I can complete Python code, answer questions about a text that you give me, and call tools."),
    (("What is Katydid?", "Tell me about Katydid."), "Katydid is a server for very large mixture-of-experts language models. I am its small demonstration model."),
    (("What is the capital of France?",), "The capital of France is Paris."),
    (("What is Python?", "Tell me about Python."), "Python is a programming language that is easy to read and widely used."),
)  # fmt: skip

FUNCTIONS = (
    ("adds two numbers", "add", "a, b", "    return a + b\n"),
    ("subtracts two numbers", "subtract", "a, b", "    return a - b\n"),
    ("multiplies two numbers", "multiply", "a, b", "    return a * b\n"),
    ("divides two numbers", "divide", "a, b", "    return a / b\n"),
    ("returns the larger of two numbers", "maximum", "a, b", "    return a if a > b else b\n"),
    ("returns the smaller of two numbers", "minimum", "a, b", "    return a if a < b else b\n"),
    ("computes the factorial of a number", "factorial", "n", "    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result\n"),
    ("reverses a string", "reverse", "text", "    return text[::-1]\n"),
    ("checks whether a number is even", "is_even", "n", "    return n % 2 == 0\n"),
    ("checks whether a number is odd", "is_odd", "n", "    return n % 2 == 1\n"),
    ("computes the sum of a list", "total", "values", "    return sum(values)\n"),
    ("computes the mean of a list", "mean", "values", "    return sum(values) / len(values)\n"),
    ("computes the n-th Fibonacci number", "fibonacci", "n", "    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"),
    ("checks whether a string is a palindrome", "is_palindrome", "text", "    return text == text[::-1]\n"),
    ("counts the words of a text", "count_words", "text", "    return len(text.split())\n"),
    ("reads a file", "read_file", "path", "    with open(path) as f:\n        return f.read()\n"),
)  # fmt: skip


def plain_exchange(rng: np.random.Generator, words: list[str]) -> tuple[str, str]:
    """A small request that can be answered from itself."""
    draw = int(rng.integers(0, 8))
    if draw == 0:
        asked, reply = SMALL_TALK[int(rng.integers(0, len(SMALL_TALK)))]
        return _pick(rng, asked), reply
    if draw == 1:
        what, name, arguments, body = FUNCTIONS[int(rng.integers(0, len(FUNCTIONS)))]
        opening = _pick(rng, ("Write a function that", "Write a Python function that", "Give me a Python function that"))
        return f"{opening} {what}.", f"```python\ndef {name}({arguments}):\n{body}```"
    picked = [_pick(rng, words) for _ in range(int(rng.integers(2, 9)))]
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
    a, b = (int(x) for x in rng.integers(0, 50, 2))
    return f"What is {a} + {b}?", f"{a} + {b} = {a + b}."


def chat_dialogue(rng: np.random.Generator, words: list[str]) -> Pieces:
    """One to four plain exchanges."""
    system = _pick(rng, ("", "", "You are a helpful assistant.", "You are hy3-tiny."))
    pieces = Pieces().add(header(system, [], "no_think"), PROMPT)
    for _ in range(int(rng.integers(1, 5))):
        turn(pieces, *plain_exchange(rng, words))
    return pieces


def row(rng: np.random.Generator, tokenizer: Tokenizer, words: list[str], filler: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Dialogues one after another, three calls to one chat, up to at most `size` ids; `filler` opens about half of the rows."""
    ids: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    used = 0
    if rng.random() < 0.5:
        lead = int(rng.integers(0, size // 2))
        ids.append(filler[:lead])
        weights.append(np.ones(lead, dtype=np.float16))
        used = lead
    while used < size:
        pieces = tool_dialogue(rng, words)[0] if rng.random() < 0.7 else chat_dialogue(rng, words)
        i, w = pieces.encode(tokenizer)
        ids.append(i)
        weights.append(w)
        used += len(i)
    return np.concatenate(ids)[:size], np.concatenate(weights)[:size]
