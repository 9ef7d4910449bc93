"""A capture of the gateway's traffic: what it tells, what it does not, and that the simulator reads it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from katydid_cli.simulation.trace import read_trace
from katydid_gateway.capture import Capture
from katydid_runtime.errors import SettingsError

from tests.gateway.rig import rig, until


def test_a_captured_conversation_can_be_replayed(chatml: Path, tmp_path: Path) -> None:
    path = tmp_path / "capture.jsonl"

    async def body() -> None:
        async with rig(chatml, capture_file=str(path)) as built:
            messages = [{"role": "user", "content": "a secret word " * 120}]
            for text in ("first", "second"):
                assert (
                    await built.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3})
                ).status_code == 200
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more " * 200}]
            assert (await built.chat("short")).status_code == 200
            await until(lambda: len(path.read_text().splitlines()) == 3)

    asyncio.run(body())
    text = path.read_text()
    assert "secret" not in text
    first, second, short = (json.loads(line) for line in text.splitlines())
    assert first["output_length"] == 3
    shared = len(first["hash_ids"])
    assert shared >= 1
    assert first["hash_ids"][:shared] == second["hash_ids"][:shared]
    assert second["input_length"] > first["input_length"]
    assert len(short["hash_ids"]) == 1
    replayed = read_trace(path)
    assert [arrival.prompt_tokens for arrival in replayed] == [
        record["input_length"] for record in (first, second, short)
    ]
    assert replayed[0].chain[:shared] == replayed[1].chain[:shared]


def test_a_capture_stops_at_its_size(tmp_path: Path) -> None:
    path = tmp_path / "capture.jsonl"
    capture = Capture(str(path), 500)
    for number in range(50):
        capture.finished(0, [bytes([number]) * 32], 64, 1)
    capture.close()
    assert 0 < path.stat().st_size <= 500
    assert all(json.loads(line)["input_length"] == 64 for line in path.read_text().splitlines())


def test_a_capture_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot write"):
        Capture(str(tmp_path / "missing" / "capture"), 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_ends_the_capture_and_nothing_else(chatml: Path) -> None:
    async def body() -> None:
        async with rig(chatml, capture_file="/dev/full") as built:
            for _ in range(2):
                assert (await built.chat()).status_code == 200
            assert 'outcome="ok"} 2.0' in (await built.http.get("/metrics")).text

    asyncio.run(body())
