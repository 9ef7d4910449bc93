"""Sessions with a real engine process: breaches of the protocol, aborts, deadlines, lost streams, and its Watch."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf import duration_pb2
from katydid.engine.v1 import engine_pb2 as pb
from katydid.engine.v1.engine_pb2_grpc import AdminServiceStub, EngineServiceStub
from katydid_runtime.block_hash import hash_chain
from katydid_runtime.errors import ConflictError, InvalidRequestError, KatydidError
from katydid_runtime.rpc_errors import from_rpc_error

from tests.engine.engine_process import Service, SessionClient, engine, session, submission
from tests.engine.test_engine_process import prompt, run, until_idle
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = ["--max-batch-tokens=128", "--kv-pages=96", "--reattach-window-s=1", "--fault-delays=decode:2"]
    folder = tmp_path_factory.mktemp("engine")
    with engine(write_tiny_model(folder / "tiny"), folder, *options) as service:
        yield service


def test_protocol_breaches_end_the_stream(running: Service) -> None:
    async def scenario() -> None:
        async def failure(client: SessionClient) -> KatydidError:
            async with asyncio.timeout(10):
                while client.broken is None:
                    await asyncio.sleep(0.01)
            with pytest.raises(grpc.RpcError) as caught:
                raise client.broken
            return from_rpc_error(caught.value)

        async with session(running.address) as client:
            client.submit(prompt(10), max_tokens=500, ignore_eos=True)
            client.send(submit=submission(1, [1]))
            error = await failure(client)
            assert isinstance(error, ConflictError)
            assert error.field == "submit.request"
        async with session(running.address) as client:
            client.send(open=pb.SessionOpen())
            assert isinstance(await failure(client), InvalidRequestError)
        async with grpc.aio.insecure_channel(running.address) as channel:
            call = EngineServiceStub(channel).Session()
            await call.write(pb.SessionRequest(ack=pb.FrameAck(frame=1)))
            with pytest.raises(grpc.RpcError) as caught:
                await call.read()
            assert from_rpc_error(caught.value).allowed == "open"

    run(scenario())


def test_abort_and_deadline(running: Service) -> None:
    async def scenario() -> None:
        async with session(running.address) as client:
            victim = client.submit(prompt(50), max_tokens=3000, ignore_eos=True, n=2)
            late = client.submit(
                prompt(60), max_tokens=3000, ignore_eos=True, timeout=duration_pb2.Duration(nanos=300_000_000)
            )
            while not victim.output:
                await asyncio.sleep(0.01)
            client.send(abort=pb.AbortRequest(request=1))
            client.send(abort=pb.AbortRequest(request=77))
            await asyncio.wait_for(victim.done.wait(), 20)
            assert {end.reason for end in victim.ends.values()} == {pb.FINISH_REASON_ABORT}
            assert victim.end.output_tokens == len(victim.output)
            await asyncio.wait_for(late.done.wait(), 20)
            assert late.end.error.reason == "DEADLINE_EXCEEDED"
            assert client.unknown == [77]
            await until_idle(client)

    run(scenario())


def test_takes_up_a_lost_stream_without_a_gap(running: Service) -> None:
    async def scenario() -> None:
        async with session(running.address) as client:
            fields = {"max_tokens": 120, "ignore_eos": True}
            expected = (await client.generate(prompt(70, 8), **fields)).output
            answer = client.submit(prompt(70, 8), **fields)
            while len(answer.output) < 20:
                await asyncio.sleep(0.005)
            await client.break_off()
            answer.done.clear()
            await asyncio.sleep(0.2)
            # As if the last frame had been lost on the way.
            number = client.frames[-1].frame
            await client.open(client.opened.session_id, number)
            assert list(client.opened.running) in ([2], [])
            said = [line for line in running.lines() if line.get("session") == client.opened.session_id]
            assert [line["message"] for line in said] == ["session opened", "session taken up"]
            assert {line["client"] for line in said} == {"test"}
            await asyncio.wait_for(answer.done.wait(), 20)
            assert answer.output == expected

    run(scenario())


def test_aborts_what_nobody_takes_up(running: Service) -> None:
    async def scenario() -> None:
        async with session(running.address) as other, session(running.address) as client:
            client.submit(prompt(70), max_tokens=3000, ignore_eos=True)
            await client.generate(prompt(5), max_tokens=1)  # behind it
            old = client.opened.session_id
            await client.break_off()
            seen = len(other.frames)
            while len(other.frames) == seen:
                await asyncio.sleep(0.01)
            assert other.frames[-1].loads[0].running == 1, "within the window"
            await until_idle(other)
            client.frames.clear()
            await client.open(old, 5)
            assert client.opened.session_id != old
            assert client.frames[0].frame == 1

    run(scenario())


def test_watch_follows_the_cache(running: Service) -> None:
    async def scenario() -> None:
        async with session(running.address) as client:
            identity = (await client.stub.Describe(pb.DescribeRequest())).identity
            await client.generate(prompt(130, 60))
            chains = {salt: split(hash_chain(array("I", prompt(130, salt)), identity=identity)) for salt in (60, 61)}
            watch = client.stub.Watch(pb.WatchRequest())
            held: set[bytes] = set()
            event = await watch.read()
            assert event.sequence == 1
            assert event.snapshot.last
            held |= set(split(event.snapshot.hashes))
            assert held >= set(chains[60])
            assert not held & set(chains[61])
            await client.generate(prompt(130, 61))
            sequence = 1
            while not held >= set(chains[61]):
                event = await asyncio.wait_for(watch.read(), 20)
                sequence += 1
                assert event.sequence == sequence
                held = (held - set(split(event.delta.removed))) | set(split(event.delta.stored))
            async with grpc.aio.insecure_channel(running.address) as channel:
                dropped = (await AdminServiceStub(channel).Flush(pb.FlushRequest())).blocks
            assert dropped == len(held)
            while held:
                event = await asyncio.wait_for(watch.read(), 20)
                held -= set(split(event.delta.removed))
            watch.cancel()

    run(scenario())


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + 32] for i in range(0, len(hashes), 32)]
