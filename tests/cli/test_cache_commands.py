"""`katydid cache` against a real service: every command, in words and in JSON, and what it says when it can't."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from hashlib import sha256
from pathlib import Path

import pytest
from katydid_cache import CacheClient, CacheStats, Durability
from katydid_cli.__main__ import run

from tests.kvcache.running import IDENTITY, LAYOUT, ServiceProcess, make

SPACE = IDENTITY.hex()[:12]


def test_every_command_does_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"engine read,write {sha256(b'e').hexdigest()}\noperator read,admin {sha256(b'o').hexdigest()}\n")
    blocks = make(4)

    def katydid(*words: str, code: int = 0) -> str:
        assert run(["cache", *words]) == code
        out, err = capsys.readouterr()
        return out if code == 0 else err

    async def fill(address: str) -> None:
        async with CacheClient(address, token="e") as cache:
            await cache.attach(IDENTITY, LAYOUT)
            await cache.put(blocks, durability=Durability.DISK)

    with ServiceProcess(tmp_path / "disk", tokens_file=tokens) as service:
        asyncio.run(fill(service.address))
        monkeypatch.setenv("KATYDID_CACHE_ADDRESS", service.address)
        monkeypatch.setenv("KATYDID_CACHE_TOKEN", "o")
        figures = json.loads(katydid("stats", "--json"))[service.address]
        assert figures["tiers"]["memory"]["blocks"] == figures["tiers"]["disk"]["blocks"] == 4
        assert "memory" in katydid("stats")

        (space,) = json.loads(katydid("ls", "--json"))
        assert (space["identity"], space["blocks"]) == (IDENTITY.hex(), 4)
        assert SPACE in katydid("ls")
        listed = json.loads(katydid("ls", SPACE, "--json"))
        assert [block["hash"] for block in listed] == sorted(block.hash.hex() for block in blocks)
        assert {tuple(block["tiers"]) for block in listed} == {("memory", "disk")}
        assert len(katydid("ls", SPACE, "--limit", "2").splitlines()) == 3

        kept, gone = blocks[0].hash.hex(), blocks[1].hash.hex()
        assert katydid("pin", SPACE, kept, "--hold-s", "60") == "1 block pinned\n"
        assert katydid("evict", SPACE, gone) == "1 block evicted\n"
        assert katydid("evict", SPACE, kept, gone) == "0 blocks evicted, 2 not there or in use\n"
        assert katydid("pin", SPACE, kept, gone) == "1 block pinned, 1 not there\n"
        assert json.loads(katydid("evict", SPACE, "--all", "--json")) == {"evicted": 2}
        assert [block["hash"] for block in json.loads(katydid("ls", SPACE, "--json"))] == [kept]
        assert katydid("pin", SPACE, kept, "--hold-s", "0") == "1 block unpinned\n"
        assert katydid("evict", SPACE, kept) == "1 block evicted\n"

        assert katydid("flush") == "0 blocks written\n"
        assert katydid("verify") == "0 blocks read, 0 corrupt\n"
        looks = [
            json.loads(line) for line in katydid("top", "--count", "2", "--interval-s", "0.1", "--json").splitlines()
        ]
        assert [look[0]["instance"] for look in looks] == [service.address] * 2
        assert looks[1][0]["hits/s"] == "0"
        assert service.address.split(":")[1] in katydid("top", "--count", "1")

        assert "name blocks, or say --all" in katydid("evict", SPACE, code=2)
        assert "is no block" in katydid("evict", SPACE, "12", code=2)
        assert "0 namespaces begin with" in katydid("evict", "ffff", "--all", code=2)
        assert "too short" in katydid("ls", "ff", code=2)
        monkeypatch.setenv("KATYDID_CACHE_TOKEN", "e")
        assert "has no scope admin" in katydid("flush", code=1)
        monkeypatch.setenv("KATYDID_CACHE_ADDRESS", "127.0.0.1:1")
        assert "katydid: " in katydid("stats", code=1)
        away = json.loads(run_top(capsys))
        assert away[0]["in"] == "away"


def run_top(capsys: pytest.CaptureFixture[str]) -> str:
    assert run(["cache", "top", "--count", "1", "--json"]) == 0
    return capsys.readouterr().out


def test_an_instance_that_hangs_or_is_away_hides_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = CacheClient.stats

    async def impatient(self: CacheClient, *, timeout_s: float) -> CacheStats:
        return await asked(self, timeout_s=min(timeout_s, 1.0))

    monkeypatch.setattr(CacheClient, "stats", impatient)
    with ServiceProcess() as well, ServiceProcess() as hanging:
        os.kill(hanging.process.pid, signal.SIGSTOP)
        monkeypatch.setenv("KATYDID_CACHE_ADDRESS", f"{hanging.address},{well.address},127.0.0.1:1")
        assert run(["cache", "stats", "--json"]) == 1
        out, err = capsys.readouterr()
        assert list(json.loads(out)) == [well.address]
        assert f"the cache service at {hanging.address} did not answer within 1 s" in err
        assert "the connection to 127.0.0.1:1 failed: Connection refused" in err
        assert run(["cache", "top", "--count", "1", "--json"]) == 0
        assert [row["in"] for row in json.loads(capsys.readouterr().out)] == ["away", "-", "away"]
        monkeypatch.setenv("KATYDID_CACHE_ADDRESS", hanging.address)
        assert run(["cache", "flush", "--timeout-s", "0.2"]) == 1
        assert "did not answer within 0.2 s; --timeout-s waits longer" in capsys.readouterr().err
