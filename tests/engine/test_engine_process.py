"""A whole engine process over gRPC: what it says of itself, generation, refusals, admin."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Coroutine, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from katydid.engine.v1 import engine_pb2 as pb
from katydid.engine.v1.engine_pb2_grpc import AdminServiceStub, EngineServiceStub
from katydid_runtime.block_hash import fingerprint
from katydid_runtime.errors import InvalidRequestError
from katydid_runtime.rpc_errors import from_rpc_error
from katydid_runtime.tokenizer_digest import tokenizer_digest

from tests.engine.engine_process import Service, SessionClient, engine, session, submission
from tests.tiny_model import EOS_ID, VOCAB_SIZE, write_tiny_model

pytestmark = pytest.mark.e2e


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * 31 + i * i + salt * 17) % 250 for i in range(length)]


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def running(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = ["--max-batch-tokens=128", "--kv-pages=96", "--reattach-window-s=1", "--fault-delays=decode:2"]
    options += ["--http-listen=127.0.0.1:0", f"--profile-folder={tmp_path_factory.mktemp('profiles')}"]
    with engine(folder, tmp_path_factory.mktemp("engine"), *options) as service:
        yield service


def test_an_engine_that_has_had_no_request_shows_its_pages(running: Service) -> None:
    free, total = 'katydid_engine_free_pages{dp_rank="0"}', 'katydid_engine_total_pages{dp_rank="0"}'
    deadline = time.monotonic() + 60
    while free not in (metrics := running.metrics()):
        assert time.monotonic() < deadline, "it has loaded its model, and shows nothing"
        time.sleep(0.05)
    assert metrics[free] == metrics[total] == 96
    assert metrics['katydid_engine_running_choices{dp_rank="0"}'] == 0


def test_describes_itself(running: Service, folder: Path) -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(running.address) as channel:
            described = await EngineServiceStub(channel).Describe(pb.DescribeRequest())
            assert described.model == "tiny"
            assert described.hash_fingerprint == fingerprint(described.identity)
            assert described.tokenizer_digest == tokenizer_digest(folder)
            assert (described.vocab_size, list(described.eos_token_ids)) == (VOCAB_SIZE, [EOS_ID])
            assert (described.pages_per_rank, described.dp_ranks, described.block_tokens) == (96, 1, 64)
            assert described.max_model_tokens == 4096
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "katydid.engine.v1.EngineService", "katydid.engine.v1.AdminService"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING

    run(scenario())


def test_tokens_do_not_depend_on_company(running: Service) -> None:
    """Alone, in a crowd, as one of several choices, and resumed half way: the same tokens."""

    async def scenario() -> None:
        async with session(running.address) as client:
            fields = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 24, "ignore_eos": True}
            alone = await client.generate(prompt(150), seed=7, **fields)
            crowd = [client.submit(prompt(20 + 30 * i, i), seed=i, **fields) for i in range(10)]
            forked = client.submit(prompt(150), seed=6, n=3, bypass_cache=True, **fields)
            again = await client.generate(prompt(150), seed=7, **fields)
            await asyncio.gather(*(answer.done.wait() for answer in (*crowd, forked)))
            assert again.output == alone.output
            assert forked.tokens[1] == alone.output
            assert len({tuple(tokens) for tokens in forked.tokens.values()}) == 3
            generated = array("I", alone.output[:10]).tobytes()
            resumed = await client.generate(prompt(150), seed=7, generated_ids=generated, **fields)
            assert resumed.output == alone.output[10:]
            assert resumed.end.output_tokens == 14
            assert all(len(answer.output) == 24 for answer in crowd)

    run(scenario())


def test_a_crowd_of_64_says_what_each_says_alone(running: Service) -> None:
    async def scenario() -> None:
        async with session(running.address) as client:
            jobs = [
                {
                    "prompt": prompt(1 + 5 * (i % 40), i % 7),
                    "seed": i,
                    "temperature": 1.0 * (i % 2),
                    "max_tokens": 3 + i % 6,
                }
                for i in range(64)
            ]
            crowd = [client.submit(**job) for job in jobs]
            await asyncio.gather(*(answer.done.wait() for answer in crowd))
            alone = [(await client.generate(**job)).output for job in jobs]
            assert [answer.output for answer in crowd] == alone
            await until_idle(client)

    run(scenario())
    metrics = running.metrics()
    assert metrics["katydid_engine_in_flight_requests"] == 0
    assert metrics['katydid_engine_running_choices{dp_rank="0"}'] == 0
    assert metrics['katydid_engine_finished_choices_total{reason="length"}'] > 64
    assert metrics['katydid_engine_start_seconds{dp_rank="0",phase="weights"}'] > 0


def test_says_where_the_prompt_came_from_and_how_long_it_took(running: Service) -> None:
    async def scenario() -> None:
        async with session(running.address) as client:
            first = await client.generate(prompt(200, 50))
            assert first.cached() == (0, 0, 0, 0)
            second = await client.generate(prompt(200, 50))
            assert second.cached() == (192, 0, 0, 0)
            assert second.output == first.output
            assert second.phases() == ["engine.queue", "engine.prefill"]
            assert [phase.name for phase in second.end.trace.phases] == ["engine.decode"]
            other_tenant = await client.generate(prompt(200, 50), cache_salt=b"other", public_blocks=1)
            assert other_tenant.cached() == (64, 0, 0, 0)
            assert other_tenant.output == first.output

    run(scenario())


def test_log_probabilities(running: Service) -> None:
    async def scenario() -> None:
        async with session(running.address) as client:
            answer = await client.generate(prompt(140, 3), max_tokens=4, logprobs=3, prompt_logprobs=0)
            assert len(answer.chosen[0]) == 4
            assert len(answer.top[0]) == 12
            assert [answer.top[0][3 * i][0] for i in range(4)] == answer.output, "greedy takes the likeliest"
            assert len(answer.prompt_chosen) == 139
            assert all(value <= 0 for value in (*answer.chosen[0], *answer.prompt_chosen))
            # The prompt's probabilities are those of generating it.
            tail = await client.generate(
                prompt(139, 3), max_tokens=1, logprobs=0, logit_bias={prompt(140, 3)[139]: 100.0}
            )
            assert tail.chosen[0][0] == pytest.approx(answer.prompt_chosen[-1], abs=1e-5)

    run(scenario())


def test_stops(running: Service) -> None:
    async def scenario() -> None:
        async with session(running.address) as client:
            free = await client.generate(prompt(30, 9), max_tokens=12, ignore_eos=True)
            assert free.end.reason == pb.FINISH_REASON_LENGTH
            stop = free.output[4]
            stopped = await client.generate(prompt(30, 9), max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
            assert stopped.end.reason == pb.FINISH_REASON_STOP
            assert stopped.end.stop_token == stop
            assert stopped.output == free.output[: free.output.index(stop) + 1]
            late = await client.generate(
                prompt(30, 9), max_tokens=12, ignore_eos=True, stop_token_ids=[stop], min_tokens=12
            )
            assert stop not in late.output[:11]
            assert late.end.output_tokens == 12

    run(scenario())


RULED = "one that can be enforced token by token, and compiles in 5 s and 1024 MiB"
GRAMMAR_KINDS = "one of json_schema, regex, ebnf, choice, structural_tag"
REFUSED = [
    ({"temperature": -0.1}, "sampling.temperature", "0 to 2"),
    ({"temperature": float("nan")}, "sampling.temperature", "0 to 2"),
    ({"top_p": 0.0}, "sampling.top_p", "above 0, at most 1"),
    ({"min_p": 1.5}, "sampling.min_p", "0 to 1"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty", "above 0, at most 2"),
    ({"presence_penalty": 3.0}, "sampling.presence_penalty", "-2 to 2"),
    ({"frequency_penalty": -3.0}, "sampling.frequency_penalty", "-2 to 2"),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, "sampling.logit_bias", f"0 to {VOCAB_SIZE - 1}"),
    ({"logit_bias": {1: float("inf")}}, "sampling.logit_bias", "-100 to 100"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "sampling.stop_token_ids", f"0 to {VOCAB_SIZE - 1}"),
    ({"min_tokens": 9, "max_tokens": 8}, "sampling.min_tokens", "0 to 8"),
    ({"max_tokens": 0}, "sampling.max_tokens", "at least 1"),
    ({"n": 0}, "sampling.n", "1 to 64"),
    ({"n": 65}, "sampling.n", "1 to 64"),
    ({"n": 2, "generated_ids": b"\1\0\0\0"}, "sampling.n", "1 with generated_ids"),
    ({"generated_ids": b"\1\0\0\0" * 8, "max_tokens": 8}, "sampling.max_tokens", "at least 9"),
    ({"logprobs": 21}, "sampling.logprobs", "0 to 20"),
    ({"prompt_logprobs": 21}, "sampling.prompt_logprobs", "0 to 20"),
    ({"grammar": pb.Grammar()}, "sampling.grammar", GRAMMAR_KINDS),
    ({"grammar": pb.Grammar(json_schema='{"type": {}}')}, "sampling.grammar.json_schema", RULED),
    ({"grammar": pb.Grammar(regex="(a")}, "sampling.grammar.regex", RULED),
    ({"adapter": "poet"}, "adapter", "the base model"),
    ({"dp_rank": 1}, "dp_rank", "0 to 0"),
    ({"priority": 1001}, "priority", "-1000 to 1000"),
    ({"tenant": b"x" * 17}, "tenant", "0 to 16 bytes"),
    ({"cache_salt": b"x" * 65}, "cache_salt", "0 to 64 bytes"),
    ({"timeout": duration_pb2.Duration(seconds=-1)}, "timeout", "more than 0 s"),
]


def test_refuses_each_wrong_field_by_name(running: Service) -> None:
    async def scenario() -> None:
        async with session(running.address) as client:
            for fields, name, allowed in REFUSED:
                answer = await client.generate([1, 2, 3], **fields)
                error = answer.end.error
                assert (error.field, error.allowed) == (name, allowed), fields
                assert error.reason in ("INVALID_REQUEST", "UNSUPPORTED")
                assert not error.retryable
            for ids, name in (([], "prompt_ids"), ([VOCAB_SIZE], "prompt_ids")):
                assert (await client.generate(ids)).end.error.field == name
            long = await client.generate([1] * 4096)
            assert (long.end.error.reason, long.end.error.allowed) == ("PROMPT_TOO_LONG", "at most 4095 tokens")
            client.answers[99] = long.__class__(1)
            odd = submission(99, [1])
            odd.prompt_ids = b"123"
            client.send(submit=odd)
            await client.answers[99].done.wait()
            assert client.answers[99].end.error.allowed == "4 bytes a token"
            assert (await client.generate([1, 2, 3])).end.reason != pb.FINISH_REASON_ERROR

    run(scenario())


async def until_idle(client: SessionClient) -> None:
    async with asyncio.timeout(20):
        while (load := client.frames[-1].loads[0]).running or load.waiting or load.free_pages != load.total_pages:
            await asyncio.sleep(0.02)


async def until_told(client: SessionClient, role: pb.Role) -> None:
    async with asyncio.timeout(20):
        while client.frames[-1].role != role:
            await asyncio.sleep(0.01)


def test_admin(running: Service) -> None:
    async def scenario() -> None:
        async with session(running.address) as client, grpc.aio.insecure_channel(running.address) as channel:
            admin = AdminServiceStub(channel)
            answer = await admin.SetRole(pb.SetRoleRequest(role=pb.ROLE_DECODE))
            assert answer.previous == pb.ROLE_BOTH
            assert (await client.stub.Describe(pb.DescribeRequest())).role == pb.ROLE_DECODE
            await until_told(client, pb.ROLE_DECODE)
            await admin.SetRole(pb.SetRoleRequest(role=pb.ROLE_BOTH))
            await until_told(client, pb.ROLE_BOTH)
            for call in (admin.SetRole(pb.SetRoleRequest()), admin.Profile(pb.ProfileRequest(steps=1001))):
                with pytest.raises(grpc.RpcError) as caught:
                    await call
                assert isinstance(from_rpc_error(caught.value), InvalidRequestError)
            profile = asyncio.ensure_future(admin.Profile(pb.ProfileRequest(steps=3)))
            while not profile.done():
                await client.generate(prompt(20), max_tokens=10, ignore_eos=True)
            paths.append((await profile).path)

    paths: list[str] = []
    run(scenario())
    assert json.loads(Path(paths[0]).read_text())["traceEvents"]
