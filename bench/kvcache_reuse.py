"""What a cache costs that never hits: prompts that share nothing, through an engine with a cache service and without.

Two fleets of gateway and engine on one machine serve the same requests in turn, a few at a time, so that whatever else
the machine does hits both. All prompts are new; every finished block is offered to the cache. What is compared is the
CPU time of the workers, which compute and pack blocks for the cache: waiting for a busy machine is not in it. `cost` is
what `bench/kvcache.py` takes.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from katydid_cli.fleet.plan import free_ports
from kvcache_services import running, service

__all__ = ["cost"]

WORDS = Path(__file__).resolve().parent.parent / "README.md"
REQUESTS = 5
TURNS = 8
PROMPT_WORDS = 250
START_S = 120
SETTLE_S = 0.5


@dataclass(frozen=True)
class Fleet:
    """A connection to the gateway, and the processes that compute."""

    connection: http.client.HTTPConnection
    workers: list[int]

    def cpu_s(self) -> float:
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.workers]
        return sum(int(of[11]) + int(of[12]) for of in fields) / os.sysconf("SC_CLK_TCK")


@contextmanager
def fleet(stack: ExitStack, model: Path, cache: str | None) -> Iterator[Fleet]:
    """A gateway before one engine, which uses the cache at an address or none."""
    engine_port, grpc_port, http_port = free_ports(3)
    with_cache = ("--kvcache-address", cache) if cache else ()
    engine = ["-m", "katydid_engine", "--listen", f"127.0.0.1:{engine_port}", "--model", str(model), *with_cache]
    gateway = [
        *("-m", "katydid_gateway", "--listen", f"127.0.0.1:{grpc_port}", "--http-listen", f"127.0.0.1:{http_port}"),
        *("--model", str(model), "--engines", f"engine=127.0.0.1:{engine_port}"),
    ]
    pid = stack.enter_context(running([sys.executable, *engine, "--device", "cpu"]))
    stack.enter_context(running([sys.executable, *gateway]))
    deadline = time.monotonic() + START_S
    while True:
        try:
            probe = http.client.HTTPConnection("127.0.0.1", http_port, timeout=5)
            probe.request("GET", "/readyz")
            if probe.getresponse().status == 200:
                break
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise SystemExit(f"no engine is ready after {START_S} s")
        time.sleep(0.2)
    connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=60)
    workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    yield Fleet(connection, [int(worker) for worker in workers])
    connection.close()


def turn(fleet: Fleet, prompts: list[str]) -> float:
    """CPU seconds of the workers for all prompts, one after another."""
    before = fleet.cpu_s()
    for prompt in prompts:
        body = json.dumps({"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0})
        fleet.connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = json.loads(fleet.connection.getresponse().read())
        if "choices" not in answer:
            raise SystemExit(f"no answer: {answer}")
    time.sleep(SETTLE_S)
    return fleet.cpu_s() - before


def cost(model: Path) -> float:
    """Per cent of time lost with the cache on, median over the turns."""
    words = WORDS.read_text().split()
    dice = random.Random(5)

    def prompts() -> list[str]:
        return [" ".join(dice.choices(words, k=PROMPT_WORDS)) for _ in range(REQUESTS)]

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        cache, _ = stack.enter_context(service("--memory-bytes", str(1 << 30), listen=f"unix:{folder}/cache.sock"))
        on = stack.enter_context(fleet(stack, model, cache))
        off = stack.enter_context(fleet(stack, model, None))
        for served in (on, off):
            turn(served, prompts())
        ratios = []
        for number in range(TURNS):
            # The same prompts: their lengths differ. Who begins takes turns.
            same = prompts()
            if number % 2:
                with_cache, without = turn(on, same), turn(off, same)
            else:
                without, with_cache = turn(off, same), turn(on, same)
            ratios.append(with_cache / without)
    return 100 * (statistics.median(ratios) - 1)


if __name__ == "__main__":
    print(f"{cost(Path(sys.argv[1])):.2f} % of time lost, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
