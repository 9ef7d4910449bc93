"""Engines of several GPUs as processes: their answers, a lost rank, prompts that go from one to another."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
import statistics
import tempfile
import time
import traceback
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from katydid.kvcache.v1 import kvcache_pb2
from katydid.kvcache.v1.kvcache_pb2_grpc import KvCacheServiceStub
from katydid_engine.parallel import ParallelPlan
from katydid_runtime.duration import to_duration

from bench.kvcache_ttft import DENSE
from tests.engine import engine_process
from tests.engine.engine_process import Answer, Service, SessionClient, engine, service, session
from tests.engine.test_engine_kvcache import attached, blocks_held
from tests.tiny_model import write_tiny_model

HY3_TINY = Path(__file__).parents[2] / "models" / "hy3-tiny"
TYPED = {"ENGINE_LOST", "UNAVAILABLE"}
Rows = list[dict[str, Any]]


def row(figure: str, value: float, unit: str, bar: float | None = None, *, most: bool = True) -> dict[str, Any]:
    met = None if bar is None else bool(value <= bar if most else value >= bar)
    return {"figure": figure, "value": round(value, 5), "unit": unit, "bar": bar, "met": met}


def lost(gpus: int, *, dry: bool) -> Iterator[Rows]:
    """A rank of each plan is killed or stopped while requests are computed; then the engine is started again."""
    cases = [
        (f"tp{gpus}", gpus - 1, signal.SIGKILL),
        (f"dp{gpus},ep{gpus}", gpus - 1, signal.SIGKILL),
        (f"tp{gpus},sp,ep{gpus}", gpus - 1, signal.SIGSTOP),
    ]
    yield from _side_by_side([functools.partial(_lose, *case, dry=dry) for case in cases])


def agree(gpus: int, *, dry: bool) -> Iterator[Rows]:
    """Engines of several ranks, which draft, against one of a single rank."""
    plans = [f"tp{gpus}", f"dp{gpus},ep{gpus}", f"dp{gpus},ep{gpus}+{gpus}"]
    dtypes = ["float32"] if dry else ["float32", "bfloat16"]
    yield from _side_by_side([functools.partial(_agree, plans, dtype, dry=dry) for dtype in dtypes])


def hand_off(_gpus: int, *, dry: bool) -> Iterator[Rows]:
    """Prompts computed on one GPU and continued on another, and on one alone."""
    yield from _side_by_side([lambda: _hand_off([258, 650] if dry else [8202, 32778], dry=dry)])


def _side_by_side(calls: list[Callable[[], Rows]]) -> Iterator[Rows]:
    """Each has processes of its own. A call that fails is told by a row without a value."""
    engine_process.START_TIMEOUT_S = 300.0
    with ThreadPoolExecutor(len(calls)) as pool:
        for pending in [pool.submit(call) for call in calls]:
            yield pending.result()


def _agree(plans: list[str], dtype: str, *, dry: bool) -> Rows:
    options = ["--kv-pages", "256", "--max-sequences", "8", "--rank-timeout-s", "60", "--rebalance-passes", "8"]
    options += [] if dry else ["--device", "cuda", "--dtype", dtype, "--max-batch-tokens", "2048"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        try:
            made = [stack.enter_context(engine(HY3_TINY, Path(folder), *options, "--plan", "single"))]
            made += [stack.enter_context(engine(HY3_TINY, Path(folder), *options, "--plan", plan)) for plan in plans]
            dp_ranks = [1, *(ParallelPlan.parse(plan).dp for plan in plans)]
            alone, *found = (asyncio.run(_answers(it.address, dp)) for it, dp in zip(made, dp_ranks, strict=True))
        except Exception as error:
            traceback.print_exc()
            return [{"figure": f"agree, {dtype}: {error!r:.300}", "value": None, "unit": "", "bar": None, "met": False}]
    name = f"{dtype}, with drafts: tokens of one rank's, of {len(alone)}"
    bar = len(alone) if dtype == "float32" else None  # bf16 rounds in another order: near ties end otherwise
    return [
        row(f"agree, engine of {plan}, {name}", _equal(alone, tokens), "", bar, most=False)
        for plan, tokens in zip(plans, found, strict=True)
    ]


async def _answers(address: str, dp_ranks: int) -> list[int]:
    """Of greedy and of sampled requests, over all ranks that take some."""
    async with session(address) as client:
        asked = [
            client.submit(
                _prompt(100 + 30 * number, number),
                max_tokens=24,
                ignore_eos=True,
                dp_rank=number % dp_ranks,
                temperature=0.8 * (number % 2),
                top_p=0.95,
                seed=number,
            )
            for number in range(6)
        ]
        await asyncio.wait_for(asyncio.gather(*(answer.done.wait() for answer in asked)), 60)
        return [token for answer in asked for token in answer.output]


def _lose(plan: str, rank: int, how: signal.Signals, *, dry: bool) -> Rows:
    name = f"lost, {plan}, {how.name} of rank {rank}"
    options = ["--plan", plan, "--kv-pages", "256", "--max-sequences", "8", "--rank-timeout-s", "5", "--mtp", "0"]
    options += [] if dry else ["--device", "cuda", "--dtype", "bfloat16", "--max-batch-tokens", "2048"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            with engine(HY3_TINY, Path(folder), *options) as served:
                before = asyncio.run(_greedy(served.address))
                errors_s, reasons = asyncio.run(_until_errors(served, rank, how))
                ended_s = errors_s + _seconds(lambda: served.process.wait(20))
            started = time.monotonic()
            with engine(HY3_TINY, Path(folder), *options) as served:
                again = asyncio.run(_greedy(served.address))
                back_s = time.monotonic() - started
        except Exception as error:
            traceback.print_exc()
            return [{"figure": f"{name}: {error!r:.300}", "value": None, "unit": "", "bar": None, "met": False}]
    return [
        row(f"{name}: until every open request has an error", errors_s, "s", 10.0),
        row(f"{name}: open requests whose error is typed, of 4", sum(reason in TYPED for reason in reasons), "", 4)
        | {"met": set(reasons) <= TYPED and len(reasons) == 4},
        row(f"{name}: until the engine has ended", ended_s, "s", 10.0),
        row(f"{name}: started again until it answers", back_s, "s"),
        row(f"{name}: tokens as before, of {len(before)}", _equal(before, again), "", len(before), most=False),
    ]


async def _greedy(address: str) -> list[int]:
    async with session(address) as client:
        answer = await client.generate(_prompt(300, 1), max_tokens=24, ignore_eos=True)
        return answer.output


async def _until_errors(served: Service, rank: int, how: signal.Signals) -> tuple[float, list[str]]:
    """While requests wait, compute and decode."""
    async with session(served.address) as client:
        asked = [client.submit(_prompt(100 * n, n), max_tokens=3000, ignore_eos=True) for n in (1, 2, 9, 10)]
        while not asked[0].output:
            if asked[0].done.is_set():
                raise RuntimeError(f"the engine ended before a rank was lost: {served.lines()[-1:]}")
            await asyncio.sleep(0.01)
        os.kill(served.children()[rank], how)
        started = time.monotonic()
        async with asyncio.timeout(30):
            await asyncio.gather(*(answer.done.wait() for answer in asked))
        return time.monotonic() - started, [answer.end.error.reason for answer in asked if answer.ends]


def _hand_off(lengths: list[int], *, dry: bool, rounds: int = 2) -> Rows:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, longest = folder / "model", max(lengths)
        narrow = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
        write_tiny_model(model, **(DENSE | narrow if dry else DENSE))
        address = f"unix:{folder}/cache.sock"
        common = ["--kvcache-address", address, "--kvcache-fetch", "always", "--max-model-tokens", str(longest + 128)]
        common += ["--kv-pages", str(longest // 64 + 64), "--max-sequences", "4"]
        common += [] if dry else ["--device", "cuda", "--max-batch-tokens", "8192"]
        memory = str(36 << 30 >> 5 * dry)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(service("katydid_kvcache", folder, "--listen", address, "--memory-bytes", memory))
                both = []
                for gpu, role in enumerate(("prefill", "decode")):
                    with _seeing(gpu):
                        both.append(stack.enter_context(engine(model, folder, *common, "--role", role)))
                giver, taker = (served.address for served in both)
                return asyncio.run(_handed(giver, taker, address, lengths, rounds, dry=dry))
        except Exception as error:
            traceback.print_exc()
            return [{"figure": f"hand-off: {error!r:.300}", "value": None, "unit": "", "bar": None, "met": False}]


async def _handed(prefill: str, decode: str, cache: str, lengths: list[int], rounds: int, *, dry: bool = False) -> Rows:
    rows: Rows = []
    async with session(prefill) as giver, session(decode) as taker:
        await attached(giver, True)
        await attached(taker, True)
        for length in lengths:
            took: dict[str, list[float]] = defaultdict(list)
            equal = 0
            for number in range(2 * rounds + 2):
                ids = _prompt(length, 1000 * length + number, most=250)
                blocks = await _blocks(cache) + (length - 1) // 64
                # Every other time as gateways do: the engine that goes on fetches blocks as they are computed, then
                # waits for the last of them, here for as long as they take.
                follows = number % 2 == 1
                last = {"blocks_within": to_duration(1.0)} if follows else {}
                following = taker.submit(ids, max_tokens=1, fetch_only=True, **last) if follows else None
                first, first_s, _ = await _timed(giver, ids, max_tokens=1, hold=to_duration(30.0))
                if following is None:
                    started = time.perf_counter()
                    await blocks_held([cache], blocks)
                    took["written"].append(time.perf_counter() - started)
                rest, gap_s, _ = await _timed(taker, ids, generated_ids=array("I", first.output).tobytes(), **last)
                if following is not None:
                    await following.done.wait()
                whole, whole_s, second_s = await _timed(taker, ids, bypass_cache=True)
                equal += first.output + rest.output == whole.output
                took["first"].append(first_s)
                took["followed" if follows else "waited"].append(gap_s)
                took["reused"].append(sum(rest.cached()) / length)
                took["alone"].append(whole_s)
                took["second"].append(second_s)
            counted = {what: seconds[len(seconds) // (rounds + 1) :] for what, seconds in took.items()}
            ms = {what: 1e3 * statistics.median(seconds) for what, seconds in counted.items()}
            name = f"hand-off, {length} tokens"
            rows += [
                row(f"{name}: TTFT on the prefill engine", ms["first"], "ms"),
                row(f"{name}: from that to the next token, on the other GPU", ms["followed"], "ms"),
                row(f"{name}: until the cache service has the last blocks", ms["written"], "ms"),
                row(f"{name}: the next token on the other GPU, where nothing was fetched before", ms["waited"], "ms"),
                row(f"{name}: least of a prompt that was not computed again", 100 * min(took["reused"]), "%"),
                row(f"{name}: TTFT on one engine", ms["alone"], "ms"),
                row(f"{name}: from that to the next token there", ms["second"], "ms"),
                # These weights were never trained: in bf16 their near ties end otherwise where chunks do.
                row(
                    f"{name}: answers equal, of {2 * rounds + 2}",
                    equal,
                    "",
                    *([2 * rounds + 2] if dry else []),
                    most=False,
                ),
            ]
    return rows


async def _blocks(cache: str) -> int:
    async with grpc.aio.insecure_channel(cache) as channel:
        return (await KvCacheServiceStub(channel).Stats(kvcache_pb2.StatsRequest())).tiers[0].blocks


async def _timed(client: SessionClient, ids: list[int], **fields: Any) -> tuple[Answer, float, float]:
    """The answer, seconds to its first token, and from that to its second."""
    started = time.perf_counter()
    answer = client.submit(ids, **({"max_tokens": 16, "ignore_eos": True} | fields))
    times = []
    for wanted in (1, 2):
        while len(answer.output) < wanted and not answer.done.is_set():  # noqa: ASYNC110 - the session has no event
            await asyncio.sleep(0.0002)
        times.append(time.perf_counter())
    await asyncio.wait_for(answer.done.wait(), 60)
    if answer.end.HasField("error"):
        raise RuntimeError(f"{answer.end.error.reason}: {answer.end.error.message}")
    return answer, times[0] - started, times[1] - times[0]


@contextlib.contextmanager
def _seeing(gpu: int) -> Iterator[None]:
    """Processes that start meanwhile see this GPU alone."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = before.split(",")[gpu] if before else str(gpu)
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _prompt(length: int, seed: int, most: int = 4000) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(3, most) for _ in range(length)]


def _equal(some: list[int], others: list[int]) -> int:
    return sum(a == b for a, b in zip(some, others, strict=False))


def _seconds(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started
