"""What the gateway costs: agent turns of 800 KB, many streams, small requests; with mock engines, in real processes.

    python -m bench.gateway [--model FOLDER] [--rounds 3] [--peers FOLDER] [--only CASE;...] [--trace FILE]

FOLDER is any model folder; its tokenizer and chat template are used, tokenising is part of every figure. The mock
engine (tests/gateway/mock_engine.py) answers at once and keeps every block it has seen, so a first token's time is the
gateway's, the loopback's and the engine's own: hashing the prompt and a step of 1 ms, which the added time of agent
turns leaves out. With --peers other gateways (bench/gateway_peers) take turns with ours, before mock engines that speak
HTTP; they route text and tokenise nothing. Without, the figures of theirs that the file has stay there. --only measures
cases by the beginnings of their names; `routing` are the rows of bench/gateway_routing.py, with Mooncake's conversation
trace where --trace names it. Rows that are not measured stay as they are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop
from katydid_cli.model_folder import default_cache_dir, resolve_model
from tokenizers import Tokenizer

from bench.gateway_chunks import chunk_delays
from bench.gateway_peers.launch import PEERS, free_port, start_peer
from bench.gateway_routing import agents, conversations, even_split, killed_engine, unique_prompts
from bench.http_load import Exchanged, Wire, encoded, percentile
from tests.gateway.clock_words import ClockWords
from tests.gateway.processes import Process

ROOT = Path(__file__).resolve().parent.parent
WORDS = (ROOT / "docs" / "engine.md").read_text().split()
Message = dict[str, str]
Figures = dict[str, float]


def text(dice: random.Random, size: int) -> str:
    """Words of a page in another order, so many bytes of them."""
    words: list[str] = []
    left = size
    while left > 0:
        word = dice.choice(WORDS)
        words.append(word)
        left -= len(word.encode()) + 1
    return " ".join(words)


def conversation(dice: random.Random, size: int, turn: int = 8_000) -> list[Message]:
    """A conversation of so many bytes; `turn` bytes each of its messages."""
    roles = ("user", "assistant")
    count = max(1, size // turn)
    messages = [{"role": roles[place % 2], "content": text(dice, turn)} for place in range(count)]
    return messages if messages[-1]["role"] == "user" else [*messages, {"role": "user", "content": "go on"}]


async def at_once(port: int, bodies: list[bytes], wires: int, **options: Any) -> tuple[list[Exchanged], float]:
    """All bodies over so many connections; and the seconds it took."""
    queue = list(reversed(bodies))
    done: list[Exchanged] = []

    async def work() -> None:
        wire = Wire("127.0.0.1", port)
        while queue:
            done.append(await wire.send(queue.pop(), **options))
        wire.close()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(wires)))
    return done, time.perf_counter() - began


async def agent_turns(port: int, size: int, turns: int, dice: random.Random) -> Figures:
    """Turns of one agent, one after the other, each with 3 % of new text at its end; time without the engine's."""
    messages = conversation(dice, size)
    wire = Wire("127.0.0.1", port)
    await wire.send(encoded(messages, max_tokens=1))
    added: list[float] = []
    engine: list[float] = []
    for _ in range(turns):
        messages += [
            {"role": "assistant", "content": text(dice, size // 200)},
            {"role": "user", "content": text(dice, size // 40)},
        ]
        done = await wire.send(encoded(messages, max_tokens=1, stream_options={"include_usage": True}))
        added.append((done.first_s - done.engine_s) * 1e3)
        engine.append(done.engine_s * 1e3)
    wire.close()
    return {"p50": percentile(added, 0.5), "p99": percentile(added, 0.99), "engine": percentile(engine, 0.5)}


async def cold_turns(port: int, tokenizer: Tokenizer, size: int, count: int, dice: random.Random) -> Figures:
    """Conversations nobody has seen, beside the tokenizer alone on the same text."""
    shares, firsts = [], []
    wire = Wire("127.0.0.1", port)
    for _ in range(count):
        messages = conversation(dice, size)
        began = time.perf_counter()
        tokenizer.encode_batch_fast(["\n".join(message["content"] for message in messages)])
        alone = time.perf_counter() - began
        first = (await wire.send(encoded(messages, max_tokens=1))).first_s
        firsts.append(first * 1e3)
        shares.append(first / alone)
    wire.close()
    return {"p50": percentile(firsts, 0.5), "share": statistics.median(shares)}


async def crowd(port: int, size: int, wires: int, requests: int, dice: random.Random) -> Figures:
    """Agents at the same time, each in its own conversation, all of them warm."""
    agents = [conversation(dice, size) for _ in range(min(wires, 20))]
    await at_once(port, [encoded(messages, max_tokens=1) for messages in agents], 4)
    bodies = []
    for number in range(requests):
        agent = agents[number % len(agents)]
        agent += [{"role": "assistant", "content": "done"}, {"role": "user", "content": text(dice, size // 100)}]
        bodies.append(encoded(agent, max_tokens=1, stream_options={"include_usage": True}))
    done, seconds = await at_once(port, bodies, wires)
    return {
        "p50": percentile([each.first_s * 1e3 for each in done], 0.5),
        "p50_without": percentile([(each.first_s - each.tokenise_s) * 1e3 for each in done], 0.5),
        "per_s": requests / seconds,
    }


async def small(port: int, wires: int, requests: int, dice: random.Random) -> Figures:
    bodies = [encoded([{"role": "user", "content": text(dice, 200)}], max_tokens=1) for _ in range(requests)]
    _, seconds = await at_once(port, bodies, wires)
    return {"per_s": requests / seconds}


async def streams(port: int, count: int, tokens: int, dice: random.Random, health_path: str = "/healthz") -> Figures:
    """So many streams at the same time, and a health check beside them."""
    bodies = [encoded([{"role": "user", "content": text(dice, 200)}], max_tokens=tokens, ignore_eos=True)] * count
    health: list[float] = []
    stop = asyncio.Event()

    async def watch() -> None:
        wire = Wire("127.0.0.1", port)
        while not stop.is_set():
            health.append(await wire.get(health_path) * 1e3)
            await asyncio.sleep(0.05)
        wire.close()

    watching = asyncio.create_task(watch())
    done, seconds = await at_once(port, bodies, count)
    stop.set()
    await watching
    return {
        "tokens_per_s": count * tokens / seconds,
        "events_per_s": sum(each.events for each in done) / seconds,
        "healthz_p99": percentile(health, 0.99),
    }


async def chunks(port: int, clock: ClockWords, count: int, tokens: int, dice: random.Random) -> Figures:
    """So many streams at the same time, a token a chunk."""
    bodies = [
        encoded([{"role": "user", "content": text(dice, 200)}], max_tokens=tokens, ignore_eos=True)
        for _ in range(count)
    ]
    return await chunk_delays(port, bodies, clock)


def started(model: Path, engines: int, **mock: Any) -> tuple[list[Process], int]:
    """Mock engines and a gateway before them; returns the processes and the HTTP port."""
    options = [part for name, value in mock.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    limits = ["--vocab-size", "200000", "--max-model-tokens", "1000000", "--pages", "200000"]
    processes, addresses = [], []
    for _ in range(engines):
        engine = Process("-m", "tests.gateway.mock_engine", "--model", str(model), *limits, *options)
        addresses.append(engine.expect("READY").split()[1])
        processes.append(engine)
    port = free_port()
    gateway = Process(
        *("-m", "katydid_gateway", "--model", str(model), "--engines", ",".join(addresses)),
        # As the others are run: no line a request.
        *("--listen", "127.0.0.1:0", "--http-listen", f"127.0.0.1:{port}", "--log-level", "error"),
        *("--engine-queue-s", "3600"),
    )
    processes.append(gateway)

    async def ready() -> None:
        while True:
            try:
                await Wire("127.0.0.1", port).send(encoded([{"role": "user", "content": "hi"}], max_tokens=1))
            except (RuntimeError, OSError):
                await asyncio.sleep(0.1)
            else:
                return

    asyncio.run(asyncio.wait_for(ready(), 30))
    return processes, port


def measured(model: Path, rounds: int, peers: Path | None, only: tuple[str, ...]) -> dict[str, dict[str, Figures]]:
    """By gateway, "" for ours: medians over rounds. Each measurement has processes of its own; gateways take turns."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    stream = {"tokens_per_step": 16, "step_ms": 20}
    clock, ticking = ClockWords(model), {"tokens_per_step": 1, "step_ms": 20, "clock": str(model)}
    cases: dict[str, tuple[dict[str, Any], Callable[[int, random.Random], Awaitable[Figures]]]] = {
        "800 KB turn, warm": ({}, lambda port, dice: agent_turns(port, 800_000, 40, dice)),
        "800 KB, cold": ({}, lambda port, dice: cold_turns(port, tokenizer, 800_000, 8, dice)),
        "800 KB, 20 at once": ({}, lambda port, dice: crowd(port, 800_000, 20, 120, dice)),
        "220 KB, 100 at once": ({}, lambda port, dice: crowd(port, 220_000, 100, 300, dice)),
        "small, 32 at once": ({}, lambda port, dice: small(port, 32, 3000, dice)),
        "256 streams": (stream, lambda port, dice: streams(port, 256, 2048, dice)),
        "256 x 50 tokens/s": (ticking, lambda port, dice: chunks(port, clock, 256, 400, dice)),
    }
    cases = {name: case for name, case in cases.items() if not only or name.startswith(only)}
    others = {"256 streams": lambda port, dice: streams(port, 256, 2048, dice, "/health")}
    found: dict[tuple[str, str], list[Figures]] = {}
    for number in range(rounds):
        for name, (mock, case) in cases.items():
            processes, port = started(model, 2, **mock)
            try:
                figures: Figures = uvloop.run(case(port, random.Random(number)))  # type: ignore[arg-type]
            finally:
                for process in reversed(processes):
                    process.stop()
            found.setdefault(("", name), []).append(figures)
            print(f"round {number + 1}: {name}: {figures}", flush=True)
            for peer in PEERS if peers is not None else ():
                try:
                    figures = beside(peer, peers, mock, others.get(name, case), number)  # type: ignore[arg-type]
                except (OSError, RuntimeError, TimeoutError, asyncio.IncompleteReadError) as error:
                    # A gateway that fails under a load has no figure for it.
                    print(f"round {number + 1}: {name}: {peer} failed: {error!r}", flush=True)
                    continue
                if figures:
                    found.setdefault((peer, name), []).append(figures)
                    print(f"round {number + 1}: {name}: {peer}: {figures}", flush=True)
    medians: dict[str, dict[str, Figures]] = {}
    for (gateway, name), runs in found.items():
        figures = {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}
        medians.setdefault(gateway, {})[name] = figures
    return medians


def beside(
    peer: str,
    folder: Path,
    mock: dict[str, Any],
    case: Callable[[int, random.Random], Coroutine[Any, Any, Figures]],
    seed: int,
) -> Figures:
    """One case before a peer; nothing where `folder` does not have it."""
    started = start_peer(peer, folder, 2, mock)
    if started is None:
        return {}
    try:
        return uvloop.run(asyncio.wait_for(case(started.port, random.Random(seed)), 120))
    finally:
        started.stop()


def rows(figures: dict[str, dict[str, Figures]]) -> list[dict[str, Any]]:
    """One row a bar; `peer` is the best of the peers that were measured, `peers` are all of them."""
    table = (
        ("800 KB turn, 97 % seen before: added TTFT p50", "800 KB turn, warm", "p50", "ms", 8, True),
        ("800 KB turn, 97 % seen before: added TTFT p99", "800 KB turn, warm", "p99", "ms", 20, True),
        ("800 KB cold: TTFT over the tokenizer alone", "800 KB, cold", "share", "x", 1.1, True),
        ("800 KB, 20 at once: TTFT p50", "800 KB, 20 at once", "p50", "ms", 300, True),
        (
            "800 KB, 20 at once: TTFT p50 without template and tokenizer",
            "800 KB, 20 at once",
            "p50_without",
            "ms",
            300,
            True,
        ),
        ("800 KB, 20 at once: requests", "800 KB, 20 at once", "per_s", "1/s", 60, False),
        ("220 KB, 100 at once: TTFT p50", "220 KB, 100 at once", "p50", "ms", 250, True),
        ("small requests, 32 at once", "small, 32 at once", "per_s", "1/s", 1500, False),
        ("256 streams: tokens", "256 streams", "tokens_per_s", "1/s", 60_000, False),
        ("256 streams: /healthz p99", "256 streams", "healthz_p99", "ms", 100, True),
        ("256 x 50 tokens/s, a token a chunk: added delay p99", "256 x 50 tokens/s", "p99", "ms", 10, True),
    )
    made = []
    for figure, case, name, unit, bar, lower in table:
        if case not in figures.get("", {}):
            continue
        value = figures[""][case][name]
        peers = {peer: round(cases[case][name], 3) for peer, cases in figures.items() if peer and case in cases}
        if name == "share":
            peers = {}
        best = (min if lower else max)(peers, key=peers.__getitem__, default=None)
        met = value <= bar if lower else value >= bar
        made.append(
            {
                "figure": figure,
                "value": round(value, 3),
                "unit": unit,
                "floor": None,
                "peer": best,
                "peer_value": peers[best] if best is not None else None,
                "peers": peers,
                "bar": bar,
                "met": met,
            }
        )
    return made


def kept(made: list[dict[str, Any]], before: Path) -> list[dict[str, Any]]:
    """The rows with the peers' figures of an earlier run, where this one had none; rows of others stay."""
    if not before.is_file():
        return made
    known = {row["figure"]: row for row in json.loads(before.read_text())["rows"]}
    for row in made:
        old = known.pop(row["figure"], {})
        if not row["peers"] and old.get("peers"):
            row |= {name: old[name] for name in ("peer", "peer_value", "peers")}
    return [*made, *known.values()]


def routing_rows(model: Path, trace: Path | None) -> list[dict[str, Any]]:
    """Rows that do not need the machine for themselves."""
    made = [*agents(), *(conversations(trace) if trace is not None else ())]
    return [*made, *unique_prompts(), *even_split(model), *killed_engine(model)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path, help="folder of other gateways, see bench/gateway_peers/launch.py")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "gateway.json")
    parser.add_argument("--only", default="", help="cases to measure, semicolons between them; by default all")
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation trace in JSONL")
    options = parser.parse_args()
    model = resolve_model(options.model, default_cache_dir())
    only = tuple(name for name in options.only.split(";") if name)
    made = rows(measured(model, options.rounds, options.peers, only))
    if not only or "routing" in only:
        made += routing_rows(model, options.trace)
    for row in made:
        met = f"bar {row['bar']:g}: met {row['met']}"
        print(f"{row['figure']:<45}{row['value']:>12,.2f} {row['unit']:<4} {met} {row['peers'] or ''}")
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, cwd=ROOT, check=False)
    before = json.loads(options.output.read_text()) if options.output.is_file() else {"versions": {}}
    report = {
        "gpu": None,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        # Those of the other gateways are in their folders' own environments.
        "versions": before["versions"] | {name: version(name) for name in ("grpcio", "tokenizers", "uvicorn")},
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", "bench/gateway.py", *sys.argv[1:]]),
        "rows": made,
    }
    report["rows"] = kept(made, options.output)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
