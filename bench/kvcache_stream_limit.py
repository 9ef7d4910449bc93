"""What gRPC's Python library alone costs a stream, beside what the KV-cache service's Get and Put cost over it.

    python bench/kvcache_stream_limit.py

A bare server and client send 1 MiB messages that nobody looks at, over the same kind of channel, loop and buffers as
the cache's. Counted is the CPU time of both processes, which is not another's when the machine is busy: its larger half
is the time a stream takes when each side has a core of its own, and so the speed that no service over this library
exceeds. `rows` is what `bench/kvcache.py` takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import uvloop
from katydid_cache import BlockLayout, CacheClient, PutBlock, keep_buffers_mapped
from katydid_cache.client import CHANNEL
from katydid_runtime.channel import open_channel
from kvcache_services import service

__all__ = ["rows"]

LAYOUT = BlockLayout(layers=16, kv_heads=8, head_dim=64, dtype="bfloat16")
IDENTITY = b"bench-limit".ljust(32, b"\0")
FRAME = bytes(1 << 20)
BLOCKS, ROUNDS = 128, 10
GIGABYTES = BLOCKS * LAYOUT.block_bytes / 1e9

Row = dict[str, Any]


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, to the nanosecond."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


async def bare_server() -> None:
    """Sends frames, or takes them, as many as the first message says."""

    async def get(request: bytes, context: Any) -> AsyncIterator[bytes]:
        del context
        for _ in range(int(request)):
            yield FRAME

    async def put(messages: AsyncIterator[bytes], context: Any) -> bytes:
        del context
        async for _ in messages:
            pass
        return b""

    server = grpc.aio.server(options=CHANNEL)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Get": grpc.unary_stream_rpc_method_handler(get),
        "Put": grpc.stream_unary_rpc_method_handler(put),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bare", handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


@contextmanager
def bare() -> Iterator[tuple[str, int]]:
    process = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{int(process.stdout.readline())}", process.pid
    finally:
        process.terminate()
        process.wait()


async def cost(server: int, transfer: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """CPU seconds a GB of the client (this process) and of the server, the least of all rounds: what others do on the
    machine makes memory slower, and so can only add. The first round does not count."""
    spent = []
    for _ in range(ROUNDS + 1):
        before = cpu_s(os.getpid()), cpu_s(server)
        await transfer()
        after = cpu_s(os.getpid()), cpu_s(server)
        spent.append([(now - then) / GIGABYTES for now, then in zip(after, before, strict=True)])
    client, serving = zip(*spent[1:], strict=True)
    return min(client), min(serving)


async def bare_costs() -> dict[str, tuple[float, float]]:
    frames = int(GIGABYTES * 1e9) // len(FRAME)
    with bare() as (address, pid):
        async with open_channel(address, None, CHANNEL, ()) as channel:

            async def get() -> None:
                call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/Bare/Get")
                async for _ in call(str(frames).encode()):
                    pass

            async def put() -> None:
                async def messages() -> AsyncIterator[bytes]:
                    for _ in range(frames):
                        yield FRAME

                call: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary("/Bare/Put")
                await call(messages())

            return {"put": await cost(pid, put), "get": await cost(pid, get)}


async def cache_costs() -> dict[str, tuple[float, float]]:
    with service("--memory-bytes", str(1 << 30)) as (address, pid):
        async with CacheClient(address, name="bench") as cache:
            await cache.attach(IDENTITY, LAYOUT)
            payloads = [memoryview(bytearray(os.urandom(LAYOUT.block_bytes))) for _ in range(BLOCKS)]
            buffers = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(BLOCKS)]
            written: list[bytes] = []

            async def put() -> None:
                written[:] = [os.urandom(32) for _ in range(BLOCKS)]
                await cache.put([PutBlock(name, b"", payload) for name, payload in zip(written, payloads, strict=True)])

            async def get() -> None:
                if not all((await cache.get(0, b"".join(written), into=buffers)).found):
                    raise SystemExit("not found")

            return {"put": await cost(pid, put), "get": await cost(pid, get)}


def rows() -> list[Row]:
    """Of each way: the speed that the busier side allows, bare and through the cache, and each side's CPU time."""
    costs = {"gRPC alone": asyncio.run(bare_costs()), "cache": asyncio.run(cache_costs())}
    return [
        {
            "figure": f"stream, {way}, {told}: limit by CPU time of the busier side",
            "value": round(1 / max(sides), 2),
            "unit": "GB/s",
            "bar": None,
            "met": None,
            "client_s_per_gb": round(sides[0], 3),
            "server_s_per_gb": round(sides[1], 3),
        }
        for way in ("put", "get")
        for told, sides in ((name, of[way]) for name, of in costs.items())
    ]


if __name__ == "__main__":
    keep_buffers_mapped()
    if "--serve" in sys.argv:
        uvloop.run(bare_server())
    else:
        for row in rows():
            print(json.dumps(row), flush=True)
