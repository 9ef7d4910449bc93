"""What `katydid up` prints of its services' log lines."""

from __future__ import annotations

import io
import json

import pytest
from katydid_cli.fleet.display import LEVELS, TerminalDisplay, log_text
from rich.console import Console


def line(level: str = "warning", message: str = "slow step", **fields: object) -> str:
    return json.dumps({"time": "t", "level": level, "service": "engine", "logger": "x", "message": message} | fields)


def test_a_log_line_becomes_message_and_fields():
    text = log_text(line(step_ms=12, exception="Traceback\n  boom"), LEVELS.index("info"))
    assert text is not None
    assert text.plain == "slow step  step_ms=12\nTraceback\n  boom"


def test_lines_below_the_level_are_left_out():
    assert log_text(line("info"), LEVELS.index("warning")) is None
    assert log_text(line("error"), LEVELS.index("warning")) is not None


@pytest.mark.parametrize(
    "raw", ["plain text", "{broken", "3", "[]", '{"level": 3, "message": "x"}', '{"level": "odd", "message": ""}']
)
def test_what_is_no_log_line_is_shown_as_it_is(raw):
    text = log_text(raw, LEVELS.index("error"))
    assert text is not None
    assert text.plain == raw


def test_without_a_terminal_every_change_is_a_line():
    out = io.StringIO()
    display = TerminalDisplay(Console(file=out, width=100), "warning")
    display.state("engine-0", "starting")
    display.line("engine-0", line())
    display.line("engine-0", line("info", "hidden"))
    display.state("engine-0", "ready")
    display.settle()
    lines = out.getvalue().splitlines()
    assert lines[0] == " engine-0 │ starting"
    assert lines[1] == " engine-0 │ slow step"
    assert lines[2].startswith(" engine-0 │ ready after 0.")
    assert len(lines) == 3


def test_on_a_terminal_states_are_redrawn_in_place():
    out = io.StringIO()
    display = TerminalDisplay(Console(file=out, width=80, force_terminal=True), "warning")
    display.state("engine-0", "starting")
    display.line("engine-0", line())
    display.settle()
    assert "slow step" in out.getvalue()
