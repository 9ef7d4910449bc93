"""A real cache service process on a loopback port, for tests that kill it, restart it or fill its disk."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from katydid_cache import BlockLayout, PutBlock

LAYOUT = BlockLayout(layers=4, kv_heads=2, head_dim=16, dtype="bfloat16")
"""32 KiB a block: a few hundred take no time."""

IDENTITY = bytes(range(32))
MIB = 1 << 20


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine, for a minute at most."""
    asyncio.run(asyncio.wait_for(scenario(), 60))


def make(count: int) -> list[PutBlock]:
    """Blocks of random content under random hashes."""
    return [PutBlock(os.urandom(32), b"", os.urandom(LAYOUT.block_bytes)) for _ in range(count)]


def chain(blocks: list[PutBlock]) -> bytes:
    """Their hashes, packed."""
    return b"".join(block.hash for block in blocks)


class ServiceProcess:
    """`python -m katydid_kvcache` with the given options; as a context manager it is stopped at the end."""

    _program: tuple[str, ...] = ("-m", "katydid_kvcache")

    def __init__(self, folder: Path | None = None, **options: object) -> None:
        settings: dict[str, object] = {
            "listen": "127.0.0.1:0",
            "memory_bytes": 8 * MIB,
            "slab_bytes": MIB,
            "drain_timeout_s": 5,
            # It would find the flips that tests make, before those who are to find them.
            "scrub_bytes_per_s": 0,
            **({"disk_path": folder, "disk_bytes": 32 * MIB, "index_map_bytes": 64 * MIB} if folder else {}),
            **options,
        }
        self._words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        self.lines: list[str] = []
        self.address = ""

    def start(self) -> Self:
        """Run it and wait until it is ready."""
        self.process = subprocess.Popen(
            [sys.executable, *self._program, *self._words], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if "READY" in line:
                self.address = json.loads(line)["address"]
                threading.Thread(target=self._drain_stderr, daemon=True).start()
                return self
        raise AssertionError(f"not ready, exit code {self.process.wait(10)}: {''.join(self.lines)}")

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stderr is not None

    def _drain_stderr(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            self.lines.extend(stream)
