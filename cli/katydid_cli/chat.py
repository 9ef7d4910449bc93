"""A conversation in the terminal, with what each answer cost: TTFT, TPOT, and how much of the prompt was cached.

Ctrl-C ends the answer that is being written, Ctrl-D or /quit the conversation; /reset starts a new one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from katydid_client import ChatArguments, Completion, Katydid, KatydidError, Message
from rich.console import Console
from rich.text import Text

__all__ = ["ChatOptions", "chat", "cost_line"]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the command was asked for; None leaves the model's default."""

    address: str
    api_key: str | None
    model: str
    system: str | None
    max_tokens: int
    temperature: float | None
    seed: int | None

    def arguments(self) -> ChatArguments:
        arguments: ChatArguments = {"model": self.model, "max_tokens": self.max_tokens}
        if self.temperature is not None:
            arguments["temperature"] = self.temperature
        if self.seed is not None:
            arguments["seed"] = self.seed
        return arguments


def chat(options: ChatOptions, *, console: Console | None = None, client: Katydid | None = None) -> int:
    """Read lines from stdin and answer each; returns the exit code: 1 when an answer failed and stdin is no terminal.

    Raises the errors of the client when the gateway cannot be reached at all.
    """
    console = console or Console(highlight=False)
    interactive = sys.stdin.isatty()
    with client or Katydid(options.address, api_key=options.api_key) as katydid:
        served = ", ".join(model.id for model in katydid.models())
        if interactive:
            console.print(
                Text(f"{served} at {options.address}. /reset starts over, /quit ends.", "dim"), soft_wrap=True
            )
        conversation = _beginning(options)
        failed = False
        for line in _lines(console, interactive):
            if line == "/quit":
                break
            if line == "/reset":
                conversation = _beginning(options)
                continue
            asked = [*conversation, Message("user", line)]
            try:
                completion = _answer(katydid, asked, options, console)
            except KatydidError as error:
                again = "; this message is forgotten: send it again in a moment" if error.retryable else ""
                console.print(Text(f"{error}{again}", "bold red"), soft_wrap=True)
                failed = True
                continue
            except KeyboardInterrupt:
                console.print(Text("\n(interrupted)", "dim"))
                continue
            conversation = [*asked, completion.message()]
            console.print(Text(cost_line(completion), "dim"), soft_wrap=True)
    return 1 if failed and not interactive else 0


def cost_line(completion: Completion) -> str:
    """`TTFT 84 ms · TPOT 31.2 ms · 41 prompt tokens, 0 cached · 12 output tokens · engine-0`."""
    usage, timing = completion.usage, completion.timing
    tiers = {
        name: tokens
        for name in ("device", "memory", "disk", "shared")
        if (tokens := getattr(usage.cached_by_tier, name))
    }
    cached = f"{usage.cached_tokens} cached"
    if tiers:
        cached += f" ({', '.join(f'{name} {tokens}' for name, tokens in tiers.items())})"
    parts = [
        f"TTFT {timing.ttft_s * 1e3:.0f} ms",
        f"TPOT {timing.tpot_s * 1e3:.1f} ms",
        f"{usage.prompt_tokens} prompt tokens, {cached}",
        f"{usage.completion_tokens} output tokens",
        timing.engine,
        f"trace {timing.trace_id}" if timing.trace_id else "",
    ]
    return " · ".join(part for part in parts if part)


def _beginning(options: ChatOptions) -> list[Message]:
    return [Message("system", options.system)] if options.system else []


def _lines(console: Console, interactive: bool) -> Iterable[str]:
    while True:
        try:
            line = console.input("[bold cyan]you ›[/] ") if interactive else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            console.print()  # the shell's prompt starts a line of its own
            return
        if not line and not interactive:
            return
        if line.strip():
            yield line.strip()


def _answer(katydid: Katydid, messages: list[Message], options: ChatOptions, console: Console) -> Completion:
    out: dict[str, Any] = {"end": "", "soft_wrap": True}
    with katydid.chat_stream(messages, **options.arguments()) as stream:
        for event in stream:
            if event.index:
                continue
            if event.reasoning:
                console.print(Text(event.reasoning, "dim italic"), **out)
            if event.text:
                console.print(Text(event.text), **out)
            for call in event.tool_calls:
                console.print(Text(f"\n{call.name}{call.arguments}" if call.name else call.arguments, "yellow"), **out)
        console.print()
        return stream.get_final()
