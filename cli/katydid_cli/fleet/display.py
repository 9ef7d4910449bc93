"""What `katydid up` shows: a line a service while it loads, then its warnings, prefixed with who speaks."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

__all__ = ["LEVELS", "TerminalDisplay", "log_text"]

LEVELS = ("debug", "info", "warning", "error", "critical")
_COLOURS = ("cyan", "green", "magenta", "blue", "yellow")
_LEVEL_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red"}
_HIDDEN = {"time", "level", "service", "logger", "message", "exception"}


@dataclass(slots=True)
class _Progress:
    state: str
    since: float
    took_s: float | None = None


class TerminalDisplay:
    """Prints to `console`; log lines below `level` are left out, lines that are no JSON log lines never are.

    On a terminal the services' states are redrawn in place until `settle`; elsewhere each change is a line.
    """

    def __init__(self, console: Console, level: str = "warning") -> None:
        self._console = console
        self._threshold = LEVELS.index(level)
        self._services: dict[str, _Progress] = {}
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, get_renderable=self._table, refresh_per_second=8, transient=True)
            self._live.start()

    def state(self, name: str, state: str) -> None:
        now = time.monotonic()
        known = self._services.get(name)
        took_s = now - known.since if known is not None and state == "ready" else None
        self._services[name] = _Progress(state, now, took_s)
        if self._live is None:
            self._print(name, Text(state if took_s is None else f"{state} after {took_s:.1f} s", "bold"))

    def line(self, name: str, line: str) -> None:
        text = log_text(line, self._threshold)
        if text is not None:
            self._print(name, text)

    def settle(self) -> None:
        """Stop redrawing; from now on only lines are printed."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, name: str, text: Text) -> None:
        colour = _COLOURS[list(self._services).index(name) % len(_COLOURS)] if name in self._services else "white"
        self._console.print(Text(f"{name:>9} │ ", colour), text, sep="", end="\n", soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        now = time.monotonic()
        for name, progress in self._services.items():
            mark: Text | Spinner = Text("✓", "green") if progress.state == "ready" else Spinner("dots")
            seconds = progress.took_s if progress.took_s is not None else now - progress.since
            table.add_row(mark, name, progress.state, f"{seconds:.1f} s")
        return table


def log_text(line: str, threshold: int) -> Text | None:
    """A child's line for people: of a JSON log line message and fields, or None below `threshold`; else the line."""
    try:
        record = json.loads(line)
        level, message = record["level"], record["message"]
        severity = LEVELS.index(level)
    except (ValueError, TypeError, KeyError):
        return Text(line)
    if severity < threshold:
        return None
    text = Text(str(message), _LEVEL_STYLES.get(level, ""))
    for key, value in record.items():
        if key not in _HIDDEN:
            text.append(f"  {key}={value}", "dim")
    if exception := record.get("exception"):
        text.append("\n" + str(exception), "dim")
    return text
