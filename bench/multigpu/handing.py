"""Prompts that one engine computes and another continues, through the cache service: each on a GPU of its own, or both
on one. Times of the way itself, the same behind a gateway, pages bit for bit, and the loss of either engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
import traceback
from array import array
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from asking import PATIENCE_S, TAIL, ended, prompt, streamed, timed
from katydid.kvcache.v1 import kvcache_pb2
from katydid.kvcache.v1.kvcache_pb2_grpc import KvCacheServiceStub
from katydid_client import AsyncKatydid
from katydid_runtime.duration import to_duration
from telling import Rows, missing, row

from bench.kvcache_ttft import DENSE
from tests.engine.engine_process import Service, engine, service, session
from tests.engine.test_engine_kvcache import attached, blocks_held, flush
from tests.tiny_model import write_tiny_model

NARROW = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
MANY, ROUNDS = 400, 2
# Of the cache service: all blocks of a run, none of which is driven out while others are measured.
MEMORY_BYTES = 56 << 30
MOST_MAPPING_S = 60.0


@dataclass(frozen=True)
class Both:
    """Two engines beside a cache service; ``options`` and ``gpus`` start one of them again."""

    model: Path
    folder: Path
    cache: str
    block_bytes: int
    options: list[str]
    gpus: dict[str, str | None]
    prefill: Service
    decode: Service

    @contextlib.contextmanager
    def again(self, role: str) -> Iterator[Service]:
        with _seeing(self.gpus[role]), engine(self.model, self.folder, *self.options, "--role", role) as served:
            yield served


def hand_off(gpus: int, *, dry: bool) -> Iterator[Rows]:
    lengths = [258, 650] if dry else [8202, 32778]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        model = write_tiny_model(Path(name) / "model", quick=True, **(DENSE | NARROW if dry else DENSE))
        try:
            both, start_s = _started(stack, model, Path(name), gpus, max(lengths), dry=dry)
        except Exception as error:
            traceback.print_exc()
            yield [missing("hand-off, start", error)]
            return
        yield [row(f"hand-off, start: until {who}", seconds, "s") for who, seconds in start_s.items()]
        for length in lengths:
            yield _tried(f"hand-off, {length} tokens", _handed(both, length, dry=dry))
        yield _tried("hand-off, bit for bit", _bits(both, lengths[0]))
        where = f"prefill={both.prefill.address},decode={both.decode.address}"
        gateway = stack.enter_context(_gateway(both, where))
        yield _tried("hand-off, behind a gateway", _fronted(both, gateway.address, lengths))
        yield _tried("hand-off, decode engine killed", _lose_decode(both, gateway.address, lengths[0], dry=dry))
        yield _tried("hand-off, prefill engine killed", _lose_prefill(both, lengths[-1]))


def _tried(name: str, part: Coroutine[Any, Any, Rows]) -> Rows:
    try:
        return asyncio.run(part)
    except Exception as error:
        traceback.print_exc()
        return [missing(name, error)]


def _started(
    stack: contextlib.ExitStack, model: Path, folder: Path, gpus: int, longest: int, *, dry: bool
) -> tuple[Both, dict[str, float]]:
    """With seconds until the cache service, both engines and their way to it are there."""
    began = time.monotonic()
    cache = f"unix:{folder}/cache.sock"
    options = ["--kvcache-address", cache, "--kvcache-fetch", "always", "--max-model-tokens", str(longest + 128)]
    options += ["--kv-pages", str(longest // 64 + 64), "--max-sequences", "4"]
    options += [] if dry else ["--device", "cuda", "--max-batch-tokens", "8192"]
    memory = MEMORY_BYTES >> 6 * dry
    kvcache = stack.enter_context(service("katydid_kvcache", folder, "--listen", cache, "--memory-bytes", str(memory)))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    of_role = {"prefill": seen[0], "decode": seen[min(1, gpus - 1, len(seen) - 1)]}
    engines = {}
    for role, gpu in of_role.items():
        with _seeing(gpu):
            engines[role] = stack.enter_context(engine(model, folder, *options, "--role", role))
    took: dict[str, float] = {}
    for who, served in (("the cache service is ready", kvcache), ("engines are", engines["prefill"])):
        assert served.address
        took[who] = time.monotonic() - began
    assert engines["decode"].address
    took["engines are"] = time.monotonic() - began
    asyncio.run(_attached(*engines.values()))
    took["engines are attached to it"] = time.monotonic() - began
    # The first block maps the memory; from then on its pages are zeroed and registered beside whatever goes on, and
    # blocks that come to pages before they are wait for it.
    asyncio.run(_one_block(*engines.values()))
    while not dry and any(_shared_bytes(pid) < memory for served in engines.values() for pid in served.ranks()):
        if time.monotonic() - began > MOST_MAPPING_S:
            break
        time.sleep(0.1)
    took["all of its memory is registered"] = time.monotonic() - began
    heads, head_dim = (NARROW if dry else DENSE)["num_key_value_heads"], DENSE["head_dim"]
    layers = (NARROW if dry else DENSE)["num_hidden_layers"]
    block_bytes = 64 * layers * heads * head_dim * 2 * (4 if dry else 2)
    return Both(model, folder, cache, block_bytes, options, dict(of_role), *engines.values()), took


async def _one_block(prefill: Service, decode: Service) -> None:
    """From one engine to the other."""
    async with session(prefill.address) as giver, session(decode.address) as taker:
        ids = prompt(130, 1)
        await ended(giver.submit(ids, max_tokens=1))
        answer = await ended(taker.submit(ids, max_tokens=1, blocks_within=to_duration(5.0)))
        assert sum(answer.cached()) == 128, f"the decode engine found {answer.cached()}"


def _shared_bytes(pid: int) -> int:
    """Shared memory that a process has mapped."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssShmem"))


def _start_of(served: Service) -> dict[str, float]:
    """Seconds of its worker's start by phase."""
    (line,) = (line for line in served.lines() if line["message"] == "worker ready")
    seconds = line["seconds"]
    assert isinstance(seconds, dict)
    return seconds


async def _attached(*engines: Service) -> None:
    for served in engines:
        async with session(served.address) as client:
            await attached(client, True)


async def _handed(both: Both, length: int, *, dry: bool) -> Rows:
    """Every other prompt as gateways have it: the engine that goes on fetches blocks as they are computed, then waits
    for the last of them, here for as long as they take. The first prompt of either kind does not count."""
    took: dict[str, list[float]] = defaultdict(list)
    equal = 0
    async with session(both.prefill.address) as giver, session(both.decode.address) as taker:
        for number in range(2 * ROUNDS + 2):
            ids = prompt(length, 1000 * length + number)
            held = await _blocks(both.cache)
            follows = number % 2 == 1
            last = {"blocks_within": to_duration(1.0)} if follows else {}
            following = taker.submit(ids, max_tokens=1, fetch_only=True, **last) if follows else None
            first, first_s, _ = await timed(giver, ids, max_tokens=1, hold=to_duration(30.0))
            if following is None:
                started = time.perf_counter()
                await blocks_held([both.cache], held + (length - 1) // 64)
                took["written"].append(time.perf_counter() - started)
            rest, gap_s, _ = await timed(taker, ids, generated_ids=array("I", first.output).tobytes(), **last)
            if following is not None:
                await following.done.wait()
            whole, whole_s, second_s = await timed(taker, ids, bypass_cache=True)
            equal += first.output + rest.output == whole.output
            took["first"].append(first_s)
            took["followed" if follows else "waited"].append(gap_s)
            took["reused"].append(sum(rest.cached()) / length)
            took["alone"].append(whole_s)
            took["second"].append(second_s)
    counted = {what: seconds[len(seconds) // (ROUNDS + 1) :] for what, seconds in took.items()}
    median = {what: statistics.median(seconds) for what, seconds in counted.items()}
    name, sent = f"hand-off, {length} tokens", (length - 1) // 64 * both.block_bytes / 1e9
    there_s, prompts = median["first"] + median["written"], 2 * ROUNDS + 2
    return [
        row(f"{name}: TTFT on the prefill engine", 1e3 * median["first"], "ms"),
        row(f"{name}: from that to the next token, on the other engine", 1e3 * median["followed"], "ms"),
        row(f"{name}: until the cache service has the last blocks", 1e3 * median["written"], "ms"),
        row(f"{name}: to the cache service, beside the prompt", sent / there_s, "GB/s"),
        row(f"{name}: the next token on the other engine, nothing fetched before", 1e3 * median["waited"], "ms"),
        row(f"{name}: from the cache service, with that token", sent / median["waited"], "GB/s"),
        row(f"{name}: least of a prompt that was not computed again", 100 * min(took["reused"]), "%"),
        row(f"{name}: TTFT on one engine", 1e3 * median["alone"], "ms"),
        row(f"{name}: from that to the next token there", 1e3 * median["second"], "ms"),
        # These weights were never trained: in bf16 their near ties end otherwise where chunks do.
        row(f"{name}: answers equal, of {prompts}", equal, "", prompts if dry else None, most=False),
    ]


async def _bits(both: Both, length: int) -> Rows:
    """Both engines go on from the same first token, one from its own pages and one from those that it fetched before,
    so over batches of the same shape: log probabilities of every token equal bit for bit say that pages are. Each is
    asked twice, which tells what a difference is worth."""
    told, equal = 0, {"own": 0, "again": 0, "fetched": 0}
    async with session(both.prefill.address) as giver, session(both.decode.address) as taker:
        for number in range(4):
            ids = prompt(length - 7 * number, 77 + number)
            held = await _blocks(both.cache)
            first = await ended(giver.submit(ids, max_tokens=1, ignore_eos=True))
            await blocks_held([both.cache], held + (len(ids) - 1) // 64)
            fields: dict[str, Any] = {"max_tokens": TAIL, "ignore_eos": True, "logprobs": 5}
            fields["generated_ids"] = array("I", first.output).tobytes()
            # One token behind the given one: what it says further would be in blocks of its own, which later ones find.
            fetching = await ended(taker.submit(ids, **fields | {"max_tokens": 2}))
            assert sum(fetching.cached()[1:]) == (len(ids) - 1) // 64 * 64, f"fetched {fetching.cached()}"
            order = {"own": giver, "fetched": taker, "own again": giver, "fetched again": taker}
            said = {who: await ended(client.submit(ids, **fields)) for who, client in order.items()}
            assert len({answer.cached() for answer in said.values()}) == 1, {who: a.cached() for who, a in said.items()}
            values = {
                who: list(zip(answer.chosen[0], *[iter(answer.top[0])] * 5, strict=True))
                for who, answer in said.items()
            }
            told += len(values["own"])
            equal["fetched"] += _same(values["own"], values["fetched"])
            equal["own"] += _same(values["own"], values["own again"])
            equal["again"] += _same(values["fetched"], values["fetched again"])
            for who, answer in said.items():
                if values[who] != values["own"]:
                    place = _same_until(values["own"], values[who])
                    print(
                        f"bits, {len(ids)} tokens: {who} differs at {place}: {answer.output}, own {said['own'].output}"
                    )
                    print(values["own"][place - 1 : place + 1], values[who][place - 1 : place + 1], flush=True)
    name = "hand-off, bit for bit: tokens whose log probabilities are equal"
    return [
        row(f"{name}, behind fetched pages and own ones, of {told}", equal["fetched"], "", told, most=False),
        row(f"{name}, behind own pages twice, of {told}", equal["own"], "", told, most=False),
        row(f"{name}, behind fetched pages twice, of {told}", equal["again"], "", told, most=False),
    ]


async def _fronted(both: Both, gateway: str, lengths: list[int]) -> Rows:
    """Prompts as clients ask them."""
    rows: Rows = []
    async with AsyncKatydid(gateway, timeout=PATIENCE_S) as client:
        await _until_paired(client)
        for length in lengths:
            met = []
            for number in range(ROUNDS + 1):
                for served in (both.prefill, both.decode):
                    await flush(served.address)
                met.append(await streamed(client, prompt(length, 5000 * length + number)))
            name = f"hand-off, {length} tokens, behind a gateway"
            there = sum(one.engine == "decode" for one in met)
            rows += [
                row(f"{name}: TTFT", 1e3 * statistics.median(one.first_s for one in met[1:]), "ms"),
                row(
                    f"{name}: from that to the next token", 1e3 * statistics.median(one.gap_s for one in met[1:]), "ms"
                ),
                row(f"{name}: answers that the decode engine ended, of {len(met)}", there, "", len(met), most=False),
            ]
    return rows


async def _lose_decode(both: Both, gateway: str, length: int, *, dry: bool) -> Rows:
    """In the middle of an answer: the engine that computed the prompt goes on with it."""
    ids, name = prompt(length, 9), "hand-off, decode engine killed in an answer"
    async with AsyncKatydid(gateway, timeout=PATIENCE_S) as client:
        whole = await streamed(client, ids, MANY, bypass_cache=True)
        stopped = await streamed(client, ids, MANY, at=(MANY // 10, both.decode.kill))
    # In bf16 what a pass over a whole text gives differs from what steps did, and near ties end otherwise.
    bar = MANY if dry else None
    return [
        row(f"{name}: tokens in all", len(stopped.ids), "", MANY, most=False),
        row(f"{name}: tokens as before, of {MANY}", _same(whole.ids, stopped.ids), "", bar, most=False),
        row(f"{name}: longest wait for a token", 1e3 * stopped.longest_s, "ms"),
    ]


async def _lose_prefill(both: Both, length: int) -> Rows:
    """In the middle of a prompt, when the decode engine has been started again: that one computes it all."""
    ids, name = prompt(length, 10), "hand-off, prefill engine killed in a prompt"
    began = time.monotonic()
    with both.again("decode") as decode:
        where = f"prefill={both.prefill.address},decode={decode.address}"
        rows = [row("hand-off, decode engine started again until it is ready", time.monotonic() - began, "s")]
        rows += [row(f"hand-off, of that start: {phase}", took, "s") for phase, took in _start_of(decode).items()]
        with _gateway(both, where) as gateway:
            async with AsyncKatydid(gateway.address, timeout=PATIENCE_S) as client:
                await _until_paired(client)
                whole = await streamed(client, ids, bypass_cache=True)
                asking = asyncio.create_task(streamed(client, ids, bypass_cache=True))
                await asyncio.sleep(whole.first_s / 3)
                both.prefill.kill()
                killed = time.perf_counter()
                answer = await asking
    return [
        *rows,
        row(f"{name}: tokens as before, of {TAIL}", _same(whole.ids, answer.ids), "", TAIL, most=False),
        row(f"{name}: until the answer ended", 1e3 * (time.perf_counter() - killed), "ms"),
        row(f"{name}: TTFT", 1e3 * answer.first_s, "ms"),
        row(f"{name}: TTFT without a loss", 1e3 * whole.first_s, "ms"),
    ]


def _gateway(both: Both, engines: str) -> contextlib.AbstractContextManager[Service]:
    options = ("--model", str(both.model), "--engines", engines, "--kvcache-address", both.cache, "--no-console")
    return service("katydid_gateway", both.folder, "--http-listen", "127.0.0.1:0", *options)


async def _until_paired(client: AsyncKatydid) -> None:
    async with asyncio.timeout(30):
        while (await client.explain_route([5] * 200)).candidates[0].partner != "decode":  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _blocks(cache: str) -> int:
    async with grpc.aio.insecure_channel(cache) as channel:
        return (await KvCacheServiceStub(channel).Stats(kvcache_pb2.StatsRequest())).tiers[0].blocks


@contextlib.contextmanager
def _seeing(gpu: str | None) -> Iterator[None]:
    """Processes that start meanwhile see this GPU alone."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _same(some: Sequence[object], others: Sequence[object]) -> int:
    return sum(a == b for a, b in zip(some, others, strict=False))


def _same_until(some: Sequence[object], others: Sequence[object]) -> int:
    """Number of the first that differ."""
    return next((place for place, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), len(some))
