"""Rows of the gateway's benchmark that are about routing: simulated traffic, a day of unique prompts, lost engines."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from katydid_cli.simulation.engine_model import EngineSpeeds
from katydid_cli.simulation.replay import Outcome, replay
from katydid_cli.simulation.trace import Arrival, agent_traffic, read_trace
from katydid_gateway.routing.load import EngineState, RankReport, RankState
from katydid_gateway.routing.prefix_index import Holder, PrefixIndex
from katydid_gateway.routing.router import RoutedPrompt, Router

from bench.http_load import Wire, encoded
from tests.gateway.processes import Process

__all__ = ["agents", "conversations", "even_split", "killed_engine", "unique_prompts"]

PEERS = {"round-robin": "round robin", "power-of-two": "power of two", "cache-aware": "SMG's cache-aware rule"}
# An engine of Hy3 on eight H200 keeps 4M tokens in 8-bit pages.
AGENTS = EngineSpeeds(60_000, 0.008, 0.0001, 8192, 2_000_000)
CHATS = EngineSpeeds(8_000, 0.006, 0.00035, 2048, 2_000_000)
SMALL = EngineSpeeds(8_000, 0.006, 0.00035, 2048, 524_288)
ENGINES = 8

Row = dict[str, Any]


def row(figure: str, value: float, unit: str, bar: float, met: bool, peers: dict[str, float] | None = None) -> Row:
    """One row; `peers` holds the same figure of others, of which the best is named."""
    peers = peers or {}
    best = max(peers, key=peers.__getitem__, default=None)
    return {
        "figure": figure,
        "value": round(value, 4),
        "unit": unit,
        "floor": None,
        "peer": best,
        "peer_value": peers[best] if best is not None else None,
        "peers": peers,
        "bar": bar,
        "met": met,
    }


def agents() -> list[Row]:
    """Agents at work, 8 engines."""
    return simulated("agents", agent_traffic(requests=4000, sessions_per_s=0.85), {"": AGENTS})


def conversations(trace: Path) -> list[Row]:
    """Mooncake's conversation trace over engines that keep 2M tokens, and over engines that keep 512K."""
    sizes = {", 2M tokens of cache": CHATS, ", 512K tokens of cache": SMALL}
    return simulated("conversation trace", read_trace(trace), sizes)


def simulated(name: str, arrivals: list[Arrival], sizes: dict[str, EngineSpeeds]) -> list[Row]:
    """The oracle's mean TTFT over each policy's, and shares of prompt tokens that were found in caches."""
    rows: list[Row] = []
    for size, speeds in sizes.items():
        policies = ("katydid", "oracle", "near-oracle", *PEERS)
        found = {policy: replay(policy, arrivals, ENGINES, speeds) for policy in policies}
        oracle = found["oracle"].mean_ttft_s

        def share(outcome: Outcome, best: float = oracle) -> float:
            return round(best / outcome.mean_ttft_s, 4)

        others = {said: share(found[policy]) for policy, said in PEERS.items()}
        own = share(found["katydid"])
        best_of_all = own > max(others.values())
        figure = f"simulated {name}{size}: "
        rows.append(row(f"{figure}the oracle's mean TTFT over ours", own, "x", 0.9, own >= 0.9 and best_of_all, others))
        # The oracle's caches are infinite; who knows every queue as well, over the caches that there are, shows what a
        # router could still win.
        near = round(found["near-oracle"].mean_ttft_s / found["katydid"].mean_ttft_s, 4)
        rows.append(row(f"{figure}mean TTFT of an oracle over the same caches, over ours", near, "x", 0.9, near >= 0.9))
        hits = {said: round(found[policy].hit_rate, 4) for policy, said in PEERS.items()}
        best = max(hits.values())
        rate = found["katydid"].hit_rate
        rows.append(row(f"{figure}hit rate", rate, "share", best, rate >= best, hits))
        for policy, outcome in found.items():
            print(f"{name}{size}: {policy}: {outcome.mean_ttft_s:.3f} s, {outcome.hit_rate:.1%}", flush=True)
    return rows


def unique_prompts(hours: float = 24.0) -> list[Row]:
    """A day of 20,000 prompts of 20K tokens that nobody sent before, over 8 engines that drop their oldest blocks.

    Engines' events are fed as they would come; time is the router's own, so the day passes in a minute.
    """
    bound = 64 * 2**20
    built = Router(index=PrefixIndex(bound))
    for number in range(ENGINES):
        ranks = [RankState(RankReport(prefill_speed=60_000.0))]
        built.engines[f"e{number}"] = EngineState(f"e{number}", ranks, excluded="")
    dice = random.Random(0)
    blocks, kept = 312, 31_250
    queues: dict[Holder, list[bytes]] = {Holder(name, 0): [] for name in built.engines}
    steps, every_s = 20_000, hours * 3600 / 20_000
    early = late = largest = 0.0
    for number in range(steps):
        now = number * every_s
        chain = tuple(dice.randbytes(32) for _ in range(blocks))
        prompt = RoutedPrompt(chain, blocks * 64 + 30)
        chosen = built.decide(prompt, now).chosen
        assert chosen is not None
        built.sent(number, chosen, prompt, now)
        built.settled(number, chosen.holder)
        queue = queues[chosen.holder]
        built.index.stored(chosen.holder, chain)
        queue.extend(chain)
        if len(queue) > kept:
            built.index.removed(chosen.holder, queue[: len(queue) - kept])
            del queue[: len(queue) - kept]
        largest = max(largest, built.index.size_bytes + built.heat.size_bytes)
        if number == steps // 3:
            early = resident_mib()
    late = resident_mib()
    growth = late - early
    return [
        row(
            "a day of unique prompts: index over its bound",
            largest / (bound + 16 * 2**20),
            "x",
            1.0,
            largest <= bound + 16 * 2**20,
        ),
        row("a day of unique prompts: RSS grows after its first third", growth, "MiB", 5.0, growth <= 5.0),
    ]


def resident_mib() -> float:
    """This process's resident memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@contextmanager
def fleet(model: Path, engines: int, warm: bytes = b"", **mock: float) -> Iterator[tuple[list[Process], int]]:
    """Mock engines and a gateway before them, connected to all of them; the engines, and the HTTP port.

    Each engine has answered the body `warm` before, through a gateway of its own.
    """
    options = [part for name, value in mock.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    limits = ["--vocab-size", "200000", "--max-model-tokens", "1000000"]
    command = ("-m", "tests.gateway.mock_engine", "--model", str(model), *limits, *options)
    processes = [Process(*command) for _ in range(engines)]
    try:
        addresses = [process.expect("READY").split()[1] for process in processes]
        gateway, port = before(model, [f"e{number}={address}" for number, address in enumerate(addresses)])
        processes.append(gateway)
        if warm:
            for address in addresses:
                alone, own_port = before(model, [address])
                processes.append(alone)
                asyncio.run(at_once(own_port, [warm]))
        yield processes[:engines], port
    finally:
        for process in reversed(processes):
            process.stop()


def before(model: Path, engines: list[str]) -> tuple[Process, int]:
    """A gateway, connected to all of these engines, and its HTTP port."""
    gateway = Process(
        *("-m", "katydid_gateway", "--model", str(model), "--engines", ",".join(engines)),
        *("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"),
    )
    port = int(json.loads(gateway.expect('"http_address"'))["http_address"].rpartition(":")[2])
    for _ in engines:
        gateway.expect("engine connected")
    return gateway, port


def even_split(model: Path) -> list[Row]:
    """24 requests of one warm prefix at once over 2 engines: how far apart are their shares?"""
    apart = []
    messages = [{"role": "user", "content": "You are an agent with these tools and rules. " * 400}]
    with fleet(model, 2, encoded(messages, max_tokens=1), step_ms=20) as (_, port):
        asyncio.run(held(port, messages))
        for number in range(3):
            earlier = asyncio.run(routed(port))
            bodies = [
                encoded([*messages, {"role": "user", "content": f"{number} {n}"}], max_tokens=60) for n in range(24)
            ]
            asyncio.run(at_once(port, bodies))
            after = asyncio.run(routed(port))
            shares = [after[name] - earlier[name] for name in ("e0", "e1")]
            print(f"even split: {shares}", flush=True)
            apart.append(abs(shares[0] - shares[1]))
    worst = float(max(apart))
    return [row("24 warm requests of one prefix over 2 engines: difference", worst, "requests", 2, worst <= 2)]


async def at_once(port: int, bodies: list[bytes]) -> list[int]:
    """Events of each answer, all asked for at the same time."""

    async def one(body: bytes) -> int:
        wire = Wire("127.0.0.1", port)
        events = (await wire.send(body)).events
        wire.close()
        return events

    return await asyncio.gather(*(one(body) for body in bodies))


async def held(port: int, messages: list[dict[str, str]]) -> None:
    """Wait until the gateway knows that every engine has the prompt's blocks: what they did before, events tell."""
    body = json.dumps({"messages": messages}).encode()
    head = f"POST /console/api/explain HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        answer = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        if all(candidate["device_blocks"] for candidate in json.loads(answer)["candidates"]):
            return
        await asyncio.sleep(0.1)


async def routed(port: int) -> Counter[str]:
    """Requests sent so far, by engine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith("katydid_gateway_routed_requests_total{"):
            counts[line.split('"')[1]] += int(float(line.rsplit(" ", 1)[1]))
    return counts


def killed_engine(model: Path) -> list[Row]:
    """SIGKILL to one of 3 engines under 60 streams: answers that are lost, and tokens that are not as undisturbed."""
    lost = wrong = 0
    with fleet(model, 3, step_ms=10) as (engines, port):
        asked = [
            {"messages": [{"role": "user", "content": f"count to {n} and back"}], "max_tokens": 120, "seed": n}
            for n in range(60)
        ]
        whole = asyncio.run(texts(port, asked))

        async def disturbed() -> list[str | None]:
            running = asyncio.create_task(texts(port, asked))
            await asyncio.sleep(0.6)
            engines[0].kill()
            return await running

        began = time.perf_counter()
        seen = asyncio.run(disturbed())
        print(f"killed engine: {time.perf_counter() - began:.1f} s", flush=True)
        lost = sum(text is None for text in seen)
        wrong = sum(text is not None and text != other for text, other in zip(seen, whole, strict=True))
    return [
        row("kill -9 of one of 3 engines under 60 streams: answers lost", lost, "answers", 0, lost == 0),
        row("kill -9 of one of 3 engines under 60 streams: answers that differ", wrong, "answers", 0, wrong == 0),
    ]


async def texts(port: int, asked: list[dict[str, Any]]) -> list[str | None]:
    """The text of each stream; None for one that did not end as it should."""

    async def one(fields: dict[str, Any]) -> str | None:
        body = json.dumps({"model": "mock", "stream": True, "ignore_eos": True, **fields}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
        events = [part for line in answer.split(b"\n") if line.startswith(b"data: ") for part in [line[6:].strip()]]
        if not events or events[-1] != b"[DONE]":
            return None
        return "".join(
            choice["delta"].get("content") or ""
            for event in events[:-1]
            for choice in json.loads(event).get("choices", [])
        )

    return await asyncio.gather(*(one(fields) for fields in asked))
