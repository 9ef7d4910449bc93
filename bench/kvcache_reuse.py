"""What a cache costs that never hits: prompts that share nothing, through an engine with a cache service and without.

All prompts are new; every finished block is offered to the cache. The cost is counted where it arises: `kvcache_clock`
has the worker's step loop measure its own CPU time, in all and in what the cache is the cause of. Both grow alike on a
busy machine, so their ratio resolves a hundredth of a per cent, which a comparison of two fleets does not: the same
prompts through a fleet without a cache, in turn, give a difference whose 95 % interval is printed beside it. `cost` is
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from katydid_cli.fleet.plan import free_ports
from kvcache_services import running, service

__all__ = ["Cost", "cost"]

WORDS = Path(__file__).resolve().parent.parent / "README.md"
REQUESTS = 5
TURNS = 12
PROMPT_WORDS = 250
START_S = 300
SETTLE_S = 0.5
RESAMPLES = 2000
CLOCK = Path(__file__).resolve().parent / "kvcache_clock"


@dataclass(frozen=True)
class Fleet:
    """A connection to the gateway, the processes that compute, and the file in which the first of them counts."""

    connection: http.client.HTTPConnection
    workers: list[int]
    clock: Path

    def cpu_s(self) -> float:
        """CPU time of all threads of the workers, to the nanosecond."""
        tasks = [task for pid in self.workers for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def counted(self) -> tuple[float, float]:
        """CPU seconds of the step loop for the cache, and in all."""
        totals = json.loads(self.clock.read_text())
        return totals["cache_s"], totals["all_s"]


class Cost(NamedTuple):
    """Per cent of the engine's time lost: as counted, and as the difference of two fleets with its 95 % interval."""

    counted: float
    counted_interval: tuple[float, float]
    compared: float
    compared_interval: tuple[float, float]


@contextmanager
def fleet(stack: ExitStack, model: Path, cache: str | None, clock: Path) -> Iterator[Fleet]:
    """A gateway before one engine, which uses the cache at an address or none."""
    engine_port, grpc_port, http_port = free_ports(3)
    with_cache = ("--kvcache-address", cache) if cache else ()
    engine = ["-m", "katydid_engine", "--listen", f"127.0.0.1:{engine_port}", "--model", str(model), *with_cache]
    gateway = [
        *("-m", "katydid_gateway", "--listen", f"127.0.0.1:{grpc_port}", "--http-listen", f"127.0.0.1:{http_port}"),
        *("--model", str(model), "--engines", f"engine=127.0.0.1:{engine_port}"),
    ]
    path = os.pathsep.join(filter(None, (str(CLOCK), os.environ.get("PYTHONPATH"))))
    # One thread computes, and it is the step loop's.
    counting = running(
        [sys.executable, *engine, "--device", "cpu"], PYTHONPATH=path, KVCACHE_CLOCK=str(clock), OMP_NUM_THREADS="1"
    )
    pid = stack.enter_context(counting)
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
    yield Fleet(connection, [int(worker) for worker in workers], clock)
    connection.close()


def turn(fleet: Fleet, prompts: list[str]) -> None:
    """Has all prompts answered, one after another, and their blocks taken to the cache."""
    for prompt in prompts:
        body = json.dumps({"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0})
        fleet.connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = json.loads(fleet.connection.getresponse().read())
        if "choices" not in answer:
            raise SystemExit(f"no answer: {answer}")
    time.sleep(SETTLE_S)


def interval(turns: Sequence[float], dice: random.Random) -> tuple[float, float]:
    """95 % interval of the median of `turns`, by the bootstrap."""
    medians = sorted(statistics.median(dice.choices(turns, k=len(turns))) for _ in range(RESAMPLES))
    return round(medians[RESAMPLES // 40], 2), round(medians[-1 - RESAMPLES // 40], 2)


def cost(model: Path) -> Cost:
    """What the cache costs, median over the turns."""
    words = WORDS.read_text().split()
    dice = random.Random(5)

    def prompts() -> list[str]:
        return [" ".join(dice.choices(words, k=PROMPT_WORDS)) for _ in range(REQUESTS)]

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        cache, _ = stack.enter_context(service("--memory-bytes", str(1 << 30), listen=f"unix:{folder}/cache.sock"))
        on = stack.enter_context(fleet(stack, model, cache, Path(folder) / "on.json"))
        off = stack.enter_context(fleet(stack, model, None, Path(folder) / "off.json"))
        for served in (on, off):
            turn(served, prompts())
        counted, compared = [], []
        for number in range(TURNS):
            # The same prompts: their lengths differ. Who begins takes turns.
            same, spent = prompts(), {}
            before = on.counted()
            for served in (on, off) if number % 2 else (off, on):
                started = served.cpu_s()
                turn(served, same)
                spent[served.clock] = served.cpu_s() - started
            cache_s, all_s = (now - then for now, then in zip(on.counted(), before, strict=True))
            counted.append(100 * cache_s / (all_s - cache_s))
            compared.append(100 * (spent[on.clock] / spent[off.clock] - 1))
    return Cost(
        statistics.median(counted), interval(counted, dice), statistics.median(compared), interval(compared, dice)
    )


if __name__ == "__main__":
    print(cost(Path(sys.argv[1])), f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
