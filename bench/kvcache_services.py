"""What `bench/kvcache.py` measures against: the KV-cache service, and its peers where they are installed.

Peers are looked for: `redis-server` on the path, and in a folder given by the caller the Python environments `mooncake`
(mooncake-transfer-engine-non-cuda 0.3.13, redis and hiredis) and `lmcache` (lmcache 0.5.6). One that is not there is
"absent" and the rest goes on. All run on loopback and on this host's memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

__all__ = ["LmCache", "Passes", "mooncake", "redis", "running", "service"]

HERE = Path(__file__).resolve().parent
_MOONCAKE_PORTS = (50961, 59003, 50972)
_LMCACHE_PORTS = (5655, 8180, 9190)
# Run by the service's process before anything else: as `kvcache_pass.without_checksums` for the client's.
_UNCHECKED = (
    f"import runpy, sys; sys.path.insert(0, {str(HERE)!r}); from kvcache_pass import without_checksums;"
    "without_checksums(); runpy.run_module('katydid_kvcache', run_name='__main__')"
)


@contextmanager
def running(
    command: list[str], *, ready_s: float = 0.0, folder: str | None = None, **environment: str
) -> Iterator[int]:
    """A process that ends with the block; gives its id after `ready_s`."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=os.environ | environment,
        start_new_session=True,
    )
    try:
        time.sleep(ready_s)
        if process.poll() is not None:
            raise SystemExit(f"{command[0]} ended with {process.returncode}")
        yield process.pid
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


@contextmanager
def service(*options: str, listen: str = "127.0.0.1:0", checked: bool = True) -> Iterator[tuple[str, int]]:
    """A cache service; gives its address and process id."""
    start = ["-m", "katydid_kvcache"] if checked else ["-c", _UNCHECKED]
    command = [sys.executable, *start, "--listen", listen, "--log-level", "info", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "READY" in line:
                yield json.loads(line)["address"], process.pid
                return
        raise SystemExit("the service did not start")
    finally:
        process.terminate()
        process.communicate()


class Passes:
    """A program that makes one pass for each line it gets, see `kvcache_pass`."""

    def __init__(self, stack: ExitStack, *command: str) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        stack.callback(self._end)
        self._read("ready")

    def next(self) -> dict[str, float]:
        """The figures of another pass."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        figures: dict[str, float] = json.loads(self._read("{"))
        return figures

    def _read(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise SystemExit(f"a pass ended with {self._process.wait()}")

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def redis(stack: ExitStack, peers: Path) -> Passes | None:
    """Redis 7 over a Unix socket."""
    server, python = shutil.which("redis-server"), peers / "mooncake/bin/python"
    if server is None or not python.exists():
        return None
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    socket = f"{folder}/redis.sock"
    words = ["--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no"]
    words += ["--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]
    stack.enter_context(running([server, *words], ready_s=1.0, folder=folder))
    return Passes(stack, str(python), str(HERE / "kvcache_peers/redis_pass.py"), socket)


def mooncake(stack: ExitStack, peers: Path) -> Passes | None:
    """Mooncake: a master, a real client with the memory, and a dummy client that shares it."""
    tools = peers / "mooncake/bin"
    if not (tools / "mooncake_master").exists():
        return None
    master, metrics, port = _MOONCAKE_PORTS
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    words = f"-rpc_address 127.0.0.1 -rpc_port {master} -metrics_port {metrics} -metrics_host 127.0.0.1"
    stack.enter_context(running([str(tools / "mooncake_master"), *words.split()], ready_s=2.0, folder=folder))
    words = (
        "-host 127.0.0.1 -global_segment_size 1GB -local_buffer_size 256MB -metadata_server P2PHANDSHAKE -protocol tcp "
        f"-master_server_address 127.0.0.1:{master} -port {port} -threads 2"
    )
    stack.enter_context(running([str(tools / "mooncake_client"), *words.split()], ready_s=6.0, folder=folder))
    program = str(HERE / "kvcache_peers/mooncake_pass.py")
    return Passes(stack, str(tools / "python"), program, f"127.0.0.1:{port}")


class LmCache:
    """`lmcache server` over gRPC with shared memory, driven by its own benchmark: 8 chunks of 2 MiB a request."""

    def __init__(self, tools: Path, folder: str) -> None:
        self._tools = tools
        self._folder = folder
        self._first = 0

    @classmethod
    def start(cls, stack: ExitStack, peers: Path) -> LmCache | None:
        tools = peers / "lmcache/bin"
        if not (tools / "lmcache").exists():
            return None
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        rpc, http, metrics = _LMCACHE_PORTS
        words = (
            f"server --transport grpc --host 127.0.0.1 --port {rpc} --http-port {http} --prometheus-port {metrics} "
            "--l1-size-gb 1 --l1-init-size-gb 1 --no-l1-use-lazy --eviction-policy LRU --supported-transfer-mode auto "
            "--max-workers 2"
        )
        quiet = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}
        stack.enter_context(running([str(tools / "lmcache"), *words.split()], ready_s=25.0, folder=folder, **quiet))
        return cls(tools, folder)

    def next(self) -> dict[str, float]:
        """GB/s of store and retrieve, from the medians its benchmark prints."""
        rpc, http, _ = _LMCACHE_PORTS
        words = (
            f"bench server --rpc-url grpc://127.0.0.1:{rpc} --url http://127.0.0.1:{http} --mode cpu "
            "--transfer-mode lmcache_driven --num-tokens 2048 --kvcache-shape-spec (2,512,16,2,64):float16:16 "
            f"--num-blocks 512 --start {self._first} --end {self._first + 6} --interval 0.05"
        )
        self._first += 6  # what is there already would not be stored again
        ran: Any = subprocess.run(
            [str(self._tools / "lmcache"), *words.split()],
            cwd=self._folder,
            env=os.environ | {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        gigabytes = 8 * (2 << 20) / 1e9
        store = re.search(r"Cold Store.*?p50:\s+([\d.]+)", ran.stdout, re.DOTALL)
        retrieve = re.search(r"Warm Retrieve.*?p50:\s+([\d.]+)", ran.stdout, re.DOTALL)
        if store is None or retrieve is None:
            raise SystemExit("lmcache's benchmark printed no figures")
        return {"put": 1e3 * gigabytes / float(store[1]), "get": 1e3 * gigabytes / float(retrieve[1])}
