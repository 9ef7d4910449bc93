"""Engines of several ranks: tensor parallel and data parallel, over gloo, or over NCCL where there are four GPUs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from tests.engine.engine_process import Answer, Service, engine, session
from tests.engine.test_engine_process import prompt, run
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.e2e
ON = ("--device", "cuda", "--dtype", "float32", "--max-sequences", "16") if torch.cuda.device_count() >= 4 else ()


async def answers(address: str, dp_rank: int = 0) -> list[Answer]:
    async with session(address) as client:
        fields = {"max_tokens": 12, "ignore_eos": True, "dp_rank": dp_rank}
        first = await client.generate(prompt(130), **fields)
        rest = [
            client.submit(prompt(length, length), temperature=0.8, seed=length, n=1 + length % 2, **fields)
            for length in (1, 64, 65, 200)
        ]
        again = client.submit(prompt(130), logprobs=2, prompt_logprobs=1, **fields)
        await asyncio.gather(*(answer.done.wait() for answer in (*rest, again)))
        return [first, *rest, again]


async def lose_a_rank(service: Service, rank: int, how: signal.Signals) -> None:
    """While requests wait, compute and decode: each ends with a typed error within ten seconds, and the engine too."""
    async with session(service.address) as client:
        fields = {"max_tokens": 3000, "ignore_eos": True}
        open_ones = [client.submit(prompt(100 * length, length), **fields) for length in (1, 2, 9, 10)]
        while not open_ones[0].output:
            await asyncio.sleep(0.01)
        os.kill(rank, how)
        started = time.monotonic()
        await asyncio.gather(*(answer.done.wait() for answer in open_ones))
        assert time.monotonic() - started < 10
        assert {answer.end.error.reason for answer in open_ones} <= {"ENGINE_LOST", "UNAVAILABLE"}
    assert await asyncio.to_thread(service.process.wait, 20) not in (0, 2)


@pytest.mark.soak
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("plan", ["tp2", "tp2,sp,ep2", "dp2,ep2", "dp2,ep2+2", "pp2"])
def test_a_lost_rank_ends_every_request(plan: str, rank: int, how: signal.Signals, tmp_path: Path) -> None:
    """And the engine, which says the same when it is started again."""
    model = write_tiny_model(tmp_path / "tiny", "hy_v3", num_nextn_predict_layers=1)
    # Of redundant experts some are always on their way.
    options = ("--kv-pages", "256", "--plan", plan, "--rank-timeout-s", "5", "--rebalance-passes", "2")
    said: list[list[int]] = []

    async def ask(address: str) -> None:
        async with session(address) as client:
            fields = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.8, "seed": 3}
            asked = [client.submit(prompt(length), **fields) for length in (1, 70, 300)]
            await asyncio.gather(*(answer.done.wait() for answer in asked))
            said.append([token for answer in asked for token in answer.output])

    with engine(model, tmp_path, *ON, *options) as service:
        run(ask(service.address))
        ranks = service.ranks()
        run(lose_a_rank(service, ranks[rank], how))
        assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()], "no rank is left behind"
    with engine(model, tmp_path, *ON, *options) as service:
        run(ask(service.address))
    assert said[1] == said[0]
    assert len(said[0]) == 72


HY3_TINY = Path(__file__).parents[2] / "models" / "hy3-tiny"
EVERY_PLAN = {
    "tp2": (),
    "tp2,sp,ep2": (),
    "tp4,sp,ep4": (),
    "pp2": ("--micro-batches", "2"),
    "dp2,ep2": ("--micro-batches", "2"),
    "dp2,ep2 ahead": ("--async-scheduling", "on"),
    "dp2,ep2+2": ("--rebalance-passes", "8"),
    "dp2,ep2+2 ahead": ("--rebalance-passes", "8", "--async-scheduling", "on"),
    "tp2,sp,ep2+2": ("--rebalance-passes", "8"),
    "tp2,sp,dp2,ep4": (),
}


@pytest.mark.soak
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_a_trained_model_with_drafts_says_the_same_under_every_plan(plan: str, tmp_path: Path) -> None:
    common = (*ON, "--kv-pages", "64", "--rank-timeout-s", "60")
    found: list[list[list[int]]] = []

    async def ask(address: str) -> None:
        async with session(address) as client:
            asked = [
                client.submit(
                    prompt(100 + 30 * number, number),
                    max_tokens=24,
                    ignore_eos=True,
                    dp_rank=number % (2 if "dp2" in plan and found else 1),
                    temperature=0.8 * (number % 2),
                    top_p=0.95,
                    seed=number,
                )
                for number in range(5)
            ]
            await asyncio.gather(*(answer.done.wait() for answer in asked))
            found.append([answer.output for answer in asked])

    with (
        engine(HY3_TINY, tmp_path, *common) as one,
        engine(HY3_TINY, tmp_path, *common, "--plan", plan.removesuffix(" ahead"), *EVERY_PLAN[plan]) as many,
    ):
        run(ask(one.address))
        run(ask(many.address))
    assert found[1] == found[0]
    assert all(len(output) == 24 for output in found[0])


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", "hy_v3")
    single: list[Answer] = []
    paired: list[Answer] = []

    async def ask(address: str, into: list[Answer]) -> None:
        into += await answers(address)

    with (
        engine(model, tmp_path, *ON, "--kv-pages", "64") as one,
        engine(model, tmp_path, *ON, "--kv-pages", "64", "--plan", "tp2") as two,
    ):
        run(ask(one.address, single))
        run(ask(two.address, paired))
        assert [answer.tokens for answer in paired] == [answer.tokens for answer in single]
        assert paired[-1].chosen[0] == pytest.approx(single[-1].chosen[0], abs=1e-4)
        assert paired[-1].prompt_chosen == pytest.approx(single[-1].prompt_chosen, abs=1e-4)
        # The rank that only computes dies: the whole engine ends.
        os.kill(two.ranks()[1], signal.SIGKILL)
        assert two.process.wait(20) not in (0, 2)


def test_data_parallel_ranks_are_apart(tmp_path: Path) -> None:
    """They share their experts: each computes for the other's tokens, with none of its own or with some."""
    model = write_tiny_model(tmp_path / "tiny", "hy_v3")
    options = ("--plan", "dp2,ep2", "--rank-timeout-s", "4", "--async-scheduling", "on")
    with (
        engine(model, tmp_path, "--kv-pages", "64") as one,
        engine(model, tmp_path, "--kv-pages", "64", *options) as service,
    ):
        single: list[Answer] = []
        shared: list[list[Answer]] = []

        async def alone() -> None:
            single.extend(await answers(one.address))

        async def both_at_once() -> None:
            shared.extend(await asyncio.gather(answers(service.address, 0), answers(service.address, 1)))

        async def scenario() -> None:
            async with session(service.address) as client:
                first = await client.generate(prompt(130), dp_rank=0)
                other = await client.generate(prompt(130), dp_rank=1)
                again = await client.generate(prompt(130), dp_rank=1)
                assert first.output == other.output == again.output
                assert (first.cached()[0], other.cached()[0], again.cached()[0]) == (0, 0, 128)
                assert [load.dp_rank for load in client.frames[-1].loads] == [0, 1]
                wrong = await client.generate(prompt(3), dp_rank=2)
                assert wrong.end.error.allowed == "0 to 1"

        run(scenario())
        run(alone())
        run(both_at_once())
        for found in shared:
            assert [answer.tokens for answer in found] == [answer.tokens for answer in single]
        run(lose_a_rank(service, service.ranks()[1], signal.SIGSTOP))


@pytest.mark.soak
def test_engines_of_two_nodes_carry_out_one_plan(tmp_path: Path) -> None:
    """Each serves its own DP group, and computes for the other's tokens."""
    model = write_tiny_model(tmp_path / "tiny", "hy_v3")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    nodes = ("--kv-pages", "64", "--plan", "dp2,ep2", "--nodes", "2", "--rendezvous", f"127.0.0.1:{port}")
    found: list[list[Answer]] = []

    async def ask(*addresses: str) -> None:
        found.extend(await asyncio.gather(*(answers(address) for address in addresses)))

    with (
        engine(model, tmp_path, "--kv-pages", "64") as one,
        engine(model, tmp_path, *nodes, "--node-rank", "0") as first,
        engine(model, tmp_path, *nodes, "--node-rank", "1") as second,
    ):
        run(ask(one.address))
        run(ask(first.address, second.address))
    for node in found[1:]:
        assert [answer.tokens for answer in node] == [answer.tokens for answer in found[0]]
