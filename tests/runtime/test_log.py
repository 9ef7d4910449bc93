"""Log lines: valid JSON, ids of the request, nothing that a user wrote."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest
from katydid_runtime import log


@pytest.fixture
def lines():
    """Log into memory; a call returns what has been logged so far."""
    root = logging.getLogger()
    before, level, stream = root.handlers[:], root.level, io.StringIO()
    log.configure("sample", "info", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = before
    root.setLevel(level)


def test_a_line_holds_service_level_message_and_extras(lines):
    logging.getLogger("katydid.test").warning("slow %s", "step", extra={"step_ms": 12.5, "why": {1}})
    (line,) = lines()
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "service": "sample",
        "logger": "katydid.test",
        "message": "slow step",
        "step_ms": 12.5,
        "why": "{1}",
    }


def test_what_users_wrote_is_withheld(lines):
    logging.getLogger().info("request", extra={"prompt": "my secret", "messages": ["my secret"], "tokens": 3})
    (line,) = lines()
    assert line["tokens"] == 3
    assert "my secret" not in json.dumps(line)


def test_ids_follow_the_task_that_bound_them(lines):
    async def request(name: str) -> None:
        with log.bind(request=name, trace="t" + name):
            await asyncio.sleep(0)
            logging.getLogger().info("step")

    async def both() -> None:
        await asyncio.gather(request("1"), request("2"))

    asyncio.run(both())
    logging.getLogger().info("outside")
    assert [(line.get("request_id"), line.get("trace_id")) for line in lines()] == [
        ("1", "t1"),
        ("2", "t2"),
        (None, None),
    ]


def test_exceptions_stay_on_one_line(lines):
    try:
        raise RuntimeError("broken\nbadly")
    except RuntimeError:
        logging.getLogger().exception("failed")
    (line,) = lines()
    assert "RuntimeError: broken\nbadly" in line["exception"]


def test_levels_below_the_chosen_one_are_dropped(lines):
    logging.getLogger().debug("noise")
    assert lines() == []
