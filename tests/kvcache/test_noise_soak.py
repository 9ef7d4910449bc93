"""Noise on every socket of a service, for long: typed errors, no crash, and neither memory nor descriptors grow."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
from pathlib import Path

import grpc
import pytest
from katydid_runtime.errors import InternalError, KatydidError

from tests.kvcache.running import MIB, ServiceProcess
from tests.kvcache.test_streams import attached, message, stream

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

TURNS, STREAMS, CONNECTIONS = 5, 1000, 1000
KINDS = ["start", "block", "frame", "noise", "credit"]


async def noise_in_streams(address: str, dice: random.Random) -> None:
    """Valid pieces in a wrong order, with wrong numbers, and noise, in Get and Put."""
    async with grpc.aio.insecure_channel(address) as channel:
        attachment, attach = await attached(channel)
        for _ in range(STREAMS):
            put = dice.random() < 0.5
            kinds = ["start", *dice.choices(KINDS, k=dice.randrange(4))] if dice.random() < 0.7 else dice.choices(KINDS)
            messages = [message(kind, attachment, put, dice) for kind in kinds]
            try:
                await stream(channel, "Put" if put else "Get", messages)
            except InternalError:
                raise
            except KatydidError:
                pass  # any other typed error will do
        attach.cancel()


async def noise_on_sockets(dice: random.Random, host: str, ports: list[int], path: str) -> None:
    """Bytes that are nothing, to each port and to the socket of the shared memory; some hang up at once."""
    for _ in range(CONNECTIONS):
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                port = dice.choice([*ports, None])
                opening = asyncio.open_unix_connection(path) if port is None else asyncio.open_connection(host, port)
                reader, writer = await opening
                with contextlib.closing(writer):
                    writer.write(dice.randbytes(dice.choice([0, 1, 16, 300])))
                    await writer.drain()
                    if dice.random() < 0.05:
                        await reader.read(100)


def test_noise_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        dice = random.Random(5)
        listen = f"unix:{tmp_path}/cache.sock"
        options = {"peer_listen": "127.0.0.1:0", "lane_listen": "127.0.0.1:0", "stream_stall_timeout_s": 1}
        with ServiceProcess(tmp_path, listen=listen, memory_bytes=4 * MIB, **options) as service:
            proc = Path(f"/proc/{service.process.pid}")
            async with asyncio.timeout(20):
                while len(ports := listening(service.process.pid)) < 2:
                    await asyncio.sleep(0.05)
            held = []
            for _ in range(TURNS):
                await noise_in_streams(listen, dice)
                await noise_on_sockets(dice, "127.0.0.1", ports, f"{tmp_path}/cache.sock.arena")
                await asyncio.sleep(3.0)  # what was kept of broken writes is given up by then
                resident = int((proc / "statm").read_text().split()[1]) * resource.getpagesize()
                held.append((resident, len(os.listdir(proc / "fd"))))
            assert service.process.poll() is None
            print(held)
            assert held[-1][0] < held[1][0] + 16 * MIB
            assert held[-1][1] <= held[1][1] + 4

    asyncio.run(scenario())


def listening(pid: int) -> list[int]:
    """TCP ports on which a process listens."""
    own = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    tables = (Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table]
    return [int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]
