"""Function schemas with a request and the right call for it, made by program.

The training data of hy3-tiny draws from these too, with other words: a schema of the evaluation has not been seen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    "city", "name", "title", "path", "query", "language", "subject", "owner", "date", "country", "label", "topic", "email",
    "region", "origin", "target", "author", "category", "status", "color", "unit", "format", "username", "location",
    "destination", "symbol",
)  # fmt: skip
INTEGERS = (
    "count", "limit", "days", "page", "year", "amount", "size", "priority", "timeout", "port", "quantity", "age", "user_id", "order_id",
)  # fmt: skip
NUMBERS = ("price", "ratio", "latitude", "longitude", "score", "threshold", "weight", "rate")
BOOLEANS = ("verbose", "recursive", "urgent", "public", "notify", "force", "dry_run", "enabled")
PLACES = (
    "Paris", "London", "Berlin", "Tokyo", "Madrid", "Oslo", "Lima", "Cairo", "Rome", "Delhi", "Boston", "Vienna", "Dublin",
    "Prague", "Beijing", "Shanghai", "Shenzhen", "New York", "Sydney", "Toronto",
)  # fmt: skip


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


_CITY = ("city", "location", "place")
_FILE = ("path", "file_path", "filename", "file")
# Name, argument names by slot, and how people ask: the tools that demonstrations use.
EVERYDAY: tuple[tuple[tuple[str, ...], tuple[tuple[tuple[str, ...], str], ...], tuple[str, ...]], ...] = (
    (("get_weather", "weather", "get_current_weather", "weather_lookup"), ((_CITY, "place"),), (
        "What is the weather in {0}?", "What's the weather in {0}?", "How is the weather in {0} today?", "Weather in {0}?",
        "Is it raining in {0}?", "Tell me the weather in {0}.", "What is the weather like in {0}?")),
    (("get_forecast", "weather_forecast"), ((_CITY, "place"), (("days", "num_days"), "small")), (
        "What will the weather be in {0} for the next {1} days?", "Give me the {1} day forecast for {0}.")),
    (("get_time", "current_time", "get_local_time"), ((("city", "timezone", "location"), "place"),), (
        "What time is it in {0}?", "Tell me the time in {0}.")),
    (("search", "web_search", "search_web"), ((("query", "q", "text"), "words"),), (
        "Search for {0}.", "Look up {0}.", "Find information about {0}.", "Search the web for {0}")),
    (("read_file", "open_file", "cat"), ((_FILE, "path"),), ("Show me the file {0}.", "Read {0}", "What is in {0}?", "Open {0}")),
    (("write_file", "save_file"), ((_FILE, "path"), (("content", "text"), "words")), (
        "Write {1} to {0}.", "Save the text {1} in {0}.")),
    (("run_command", "bash", "shell"), ((("command", "cmd"), "command"),), ("Run {0}", "Execute the command {0}", "Please run {0}")),
    (("add", "sum_numbers"), ((("a", "x"), "small"), (("b", "y"), "small")), ("What is {0} + {1}?", "Add {0} and {1}.")),
    (("multiply",), ((("a", "x"), "small"), (("b", "y"), "small")), ("What is {0} * {1}?", "Multiply {0} by {1}.")),
    (("translate", "translate_text"), ((("text",), "words"), (("language", "target_language"), "language")), (
        "Translate {0} to {1}.", "How do you say {0} in {1}?")),
    (("send_email", "send_message"), ((("to", "recipient"), "mail"), (("subject", "body", "text"), "words")), (
        "Send an email to {0} about {1}.", "Write to {0}: {1}")),
    (("book_flight", "find_flights"), ((("origin", "from_city"), "place"), (("destination", "to_city"), "place")), (
        "Book a flight from {0} to {1}.", "Find flights from {0} to {1}.", "I want to fly from {0} to {1}.")),
    (("set_timer", "start_timer"), ((("minutes", "duration"), "small"),), ("Set a timer for {0} minutes.", "Wake me in {0} minutes.")),
    (("get_stock_price", "stock_price"), ((("symbol", "ticker"), "symbol"),), ("What is the stock price of {0}?", "Price of {0}?")),
)  # fmt: skip
LANGUAGES = ("French", "German", "Spanish", "Chinese", "Italian", "Japanese")
COMMANDS = ("ls", "ls -la", "pwd", "git status", "git log", "pytest", "make test", "pip list", "date", "whoami")


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
    names, slots, phrases = rng.choice(EVERYDAY)
    name = rng.choice(names)
    arguments = {rng.choice(keys): _everyday_value(rng, words, slot) for keys, slot in slots}
    kinds = {key: "integer" if slot == "small" else "string" for key, (_, slot) in zip(arguments, slots, strict=True)}
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
    return {"type": "function", "function": function}, rng.choice(phrases).format(*arguments.values()), arguments


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
