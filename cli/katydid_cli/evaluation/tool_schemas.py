"""Function schemas with a request and the right call for it, made by program.

The training data of hy3-tiny draws from these too, with other words: a schema of the evaluation has not been seen.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

_VOCABULARY: dict[str, Any] = tomllib.loads(
    resources.files("katydid_cli.evaluation").joinpath("tool_vocabulary.toml").read_text(encoding="utf-8")
)
VERBS, NOUNS, STRINGS, INTEGERS, NUMBERS, BOOLEANS, PLACES, LANGUAGES, COMMANDS = (
    tuple[str, ...](_VOCABULARY[name])
    for name in (
        "verbs",
        "nouns",
        "strings",
        "integers",
        "numbers",
        "booleans",
        "places",
        "languages",
        "commands",
    )
)


@dataclass(frozen=True)
class ToolCase:
    """Tools offered (OpenAI form), what the user asks, and the call that answers it (argument values as text)."""

    tools: list[dict[str, Any]]
    request: str
    name: str
    arguments: dict[str, str]


def make_tool(rng: random.Random, words: Sequence[str]) -> dict[str, Any]:
    """A function schema with one to four arguments; most names are common, some are random words."""
    noun = rng.choice(NOUNS) if rng.random() < 0.7 else rng.choice(words)
    verb = rng.choice(VERBS)
    properties: dict[str, Any] = {}
    for _ in range(rng.randint(1, 4)):
        key, kind = _argument(rng, words)
        if rng.random() < 0.5:
            kind["description"] = f"The {key.replace('_', ' ')}"
        properties.setdefault(key, kind)
    required = [k for k in properties if rng.random() < 0.8] or [next(iter(properties))]
    about = f"{verb.capitalize()} the {noun}" + ("" if rng.random() < 0.5 else f" {rng.choice(words)}")
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": f"{verb}_{noun}", "description": about, "parameters": parameters}}


def _argument(rng: random.Random, words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    draw = rng.random()
    if draw < 0.5:
        kind: dict[str, Any] = {"type": "string"}
        if rng.random() < 0.25:
            kind["enum"] = sorted({rng.choice(words) for _ in range(3)})
        return rng.choice(STRINGS) if rng.random() < 0.7 else rng.choice(words), kind
    if draw < 0.75:
        return rng.choice(INTEGERS) if rng.random() < 0.8 else rng.choice(words), {"type": "integer"}
    if draw < 0.87:
        return rng.choice(NUMBERS), {"type": "number"}
    return rng.choice(BOOLEANS), {"type": "boolean"}


def draw_argument(rng: random.Random, words: Sequence[str], kind: dict[str, Any]) -> str:
    """A value that fits the schema, as the text between <arg_value> markers."""
    if "enum" in kind:
        return str(rng.choice(kind["enum"]))
    if kind["type"] == "integer":
        return str(rng.randrange(10 ** rng.randint(1, 5)))
    if kind["type"] == "number":
        return f"{rng.uniform(0, 100):.{rng.randint(1, 3)}f}"
    if kind["type"] == "boolean":
        return rng.choice(("true", "false"))
    draw = rng.random()
    if draw < 0.3:
        return rng.choice(PLACES)
    if draw < 0.4:
        return f"{rng.randint(2000, 2030)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    if draw < 0.5:
        return f"/{rng.choice(words)}/{rng.choice(words)}.txt"
    return " ".join(rng.choices(words, k=rng.randint(1, 2)))


def phrase_request(rng: random.Random, tool: dict[str, Any], arguments: dict[str, str]) -> str:
    """A user's sentence that asks for the call and states every value."""
    verb, noun = tool["function"]["name"].split("_", 1)
    noun = noun.replace("_", " ")
    stated = [(k.replace("_", " "), v) for k, v in arguments.items()]
    rng.shuffle(stated)
    form = rng.randrange(4)
    if form == 0:
        return f"Please {verb} the {noun} with " + " and ".join(f"{k} {v}" for k, v in stated) + "."
    if form == 1:
        return f"{verb.capitalize()} {noun}: " + ", ".join(f"{k} = {v}" for k, v in stated)
    if form == 2:
        return f"Can you {verb} the {noun}? The " + ", the ".join(f"{k} is {v}" for k, v in stated) + "."
    return f"I need to {verb} a {noun}. " + " ".join(f"{k.capitalize()}: {v}." for k, v in stated)


def _everyday_value(rng: random.Random, words: Sequence[str], slot: str) -> str:
    choices = {"place": PLACES, "language": LANGUAGES, "command": COMMANDS}
    if slot in choices:
        return rng.choice(choices[slot])
    if slot == "small":
        return str(rng.randrange(1, 100))
    if slot == "path":
        return f"{rng.choice(('', '/', 'src/', '/tmp/'))}{rng.choice(words)}.{rng.choice(('py', 'txt', 'md', 'json'))}"
    if slot == "mail":
        return f"{rng.choice(words)}@example.com"
    if slot == "symbol":
        return rng.choice(words)[:4].upper()
    return " ".join(rng.choices(words, k=rng.randint(1, 3)))


def everyday_tool(rng: random.Random, words: Sequence[str]) -> tuple[dict[str, Any], str, dict[str, str]]:
    """A tool of everyday use, a natural request, and the arguments that it states."""
    entry = rng.choice(_VOCABULARY["everyday"])
    name = rng.choice(entry["names"])
    slots = entry["slots"]
    arguments = {rng.choice(slot["keys"]): _everyday_value(rng, words, slot["kind"]) for slot in slots}
    integer = [slot["kind"] == "small" for slot in slots]
    kinds = {key: "integer" if whole else "string" for key, whole in zip(arguments, integer, strict=True)}
    properties: dict[str, Any] = {}
    for key, kind in kinds.items():
        properties[key] = {"type": kind}
        if rng.random() < 0.4:
            properties[key]["description"] = f"The {key.replace('_', ' ')}"
    if rng.random() < 0.3:
        key, extra = _argument(rng, words)
        properties.setdefault(key, extra)
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.8:
        function["description"] = name.replace("_", " ").capitalize()
    function["parameters"] = {"type": "object", "properties": properties, "required": list(arguments)}
    return (
        {"type": "function", "function": function},
        rng.choice(entry["phrases"]).format(*arguments.values()),
        arguments,
    )


def everyday_case(rng: random.Random, words: Sequence[str]) -> ToolCase:
    """One everyday tool among up to two made ones."""
    tool, request, arguments = everyday_tool(rng, words)
    others = [make_tool(rng, words) for _ in range(rng.randrange(3))]
    tools = [tool, *(t for t in others if t["function"]["name"] != tool["function"]["name"])]
    rng.shuffle(tools)
    return ToolCase(tools, request, tool["function"]["name"], arguments)


def make_case(rng: random.Random, words: Sequence[str]) -> ToolCase:
    """An everyday request one time in three; else up to four made tools, one asked for with some optional arguments."""
    if rng.random() < 1 / 3:
        return everyday_case(rng, words)
    tools = list({t["function"]["name"]: t for t in (make_tool(rng, words) for _ in range(rng.randint(1, 4)))}.values())
    tool = rng.choice(tools)
    spec = tool["function"]["parameters"]
    arguments = {
        k: draw_argument(rng, words, kind)
        for k, kind in spec["properties"].items()
        if k in spec["required"] or rng.random() < 0.4
    }
    return ToolCase(tools, phrase_request(rng, tool, arguments), tool["function"]["name"], arguments)


def sorted_keys(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same tools with the keys of every object in order, as servers that sort them would show."""
    listed: list[dict[str, Any]] = json.loads(json.dumps(tools, sort_keys=True))
    return listed
