"""What a cache costs that never hits: prompts that share nothing, through an engine with a cache service and without.

Two fleets of gateway and engine on one machine serve the same requests in turn, a few at a time, so that whatever else
the machine does hits both. All prompts are new; every finished block is offered to the cache. `cost` is what
`bench/kvcache.py` takes.
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
from pathlib import Path

from katydid_cli.fleet.plan import free_ports
from kvcache_services import running, service

__all__ = ["cost"]

WORDS = Path(__file__).resolve().parent.parent / "README.md"
REQUESTS = 8
TURNS = 8
PROMPT_WORDS = 900
START_S = 120


@contextmanager
def fleet(stack: ExitStack, model: Path, cache: str | None) -> Iterator[http.client.HTTPConnection]:
    """A gateway before one engine, which uses the cache at an address or none; gives a connection to it."""
    engine_port, grpc_port, http_port = free_ports(3)
    with_cache = ("--kvcache-address", cache) if cache else ()
    engine = ["-m", "katydid_engine", "--listen", f"127.0.0.1:{engine_port}", "--model", str(model), *with_cache]
    gateway = [
        *("-m", "katydid_gateway", "--listen", f"127.0.0.1:{grpc_port}", "--http-listen", f"127.0.0.1:{http_port}"),
        *("--model", str(model), "--engines", f"engine=127.0.0.1:{engine_port}"),
    ]
    stack.enter_context(running([sys.executable, *engine, "--device", "cpu"]))
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
    yield connection
    connection.close()


def turn(connection: http.client.HTTPConnection, prompts: list[str]) -> float:
    """Seconds for all prompts, one after another."""
    started = time.perf_counter()
    for prompt in prompts:
        body = json.dumps({"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        if "choices" not in answer:
            raise SystemExit(f"no answer: {answer}")
    return time.perf_counter() - started


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
        for connection in (on, off):
            turn(connection, prompts())
        ratios = []
        for number in range(TURNS):
            # The same prompts: their lengths differ. Who begins takes turns.
            same = prompts()
            first, second = (on, off) if number % 2 else (off, on)
            times = {first: turn(first, same), second: turn(second, same)}
            ratios.append(times[on] / times[off])
    return 100 * (statistics.median(ratios) - 1)


if __name__ == "__main__":
    print(f"{cost(Path(sys.argv[1])):.2f} % of time lost, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
