"""Engines of several ranks as processes: their answers, and what becomes of them when a rank is lost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from katydid_engine.parallel import ParallelPlan
from telling import Rows, missing, row

from tests.engine import engine_process
from tests.engine.engine_process import Service, engine, session

HY3_TINY = Path(__file__).parents[2] / "models" / "hy3-tiny"
TYPED = {"ENGINE_LOST", "UNAVAILABLE"}


def lost(gpus: int, *, dry: bool) -> Iterator[Rows]:
    """A rank of each plan is killed or stopped while requests are computed; then the engine is started again."""
    cases = [
        (f"tp{gpus}", gpus - 1, signal.SIGKILL),
        (f"dp{gpus},ep{gpus}", gpus - 1, signal.SIGKILL),
        (f"tp{gpus},sp,ep{gpus}", gpus - 1, signal.SIGSTOP),
    ]
    yield from _side_by_side(
        [functools.partial(_lose, *case, dry=dry) for case in cases], most=1 if dry else len(cases)
    )


def agree(gpus: int, *, dry: bool) -> Iterator[Rows]:
    """Engines of several ranks, which draft, against one of a single rank."""
    plans = [f"tp{gpus}", f"dp{gpus},ep{gpus}", f"dp{gpus},ep{gpus}+{gpus}"]
    dtypes = ["float32"] if dry else ["float32", "bfloat16"]
    yield from _side_by_side([functools.partial(_agree, plans, dtype, dry=dry) for dtype in dtypes], most=len(dtypes))


def _side_by_side(calls: list[Callable[[], Rows]], *, most: int) -> Iterator[Rows]:
    """Each has processes of its own, ``most`` calls at a time. A call that fails is told by a row without a value."""
    engine_process.START_TIMEOUT_S = 300.0
    with ThreadPoolExecutor(most) as pool:
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
            return [missing(f"agree, {dtype}", error)]
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
            return [missing(name, error)]
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
        os.kill(served.ranks()[rank], how)
        started = time.monotonic()
        async with asyncio.timeout(30):
            await asyncio.gather(*(answer.done.wait() for answer in asked))
        return time.monotonic() - started, [answer.end.error.reason for answer in asked if answer.ends]


def _prompt(length: int, seed: int, most: int = 4000) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(3, most) for _ in range(length)]


def _equal(some: list[int], others: list[int]) -> int:
    return sum(a == b for a, b in zip(some, others, strict=False))


def _seconds(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started
