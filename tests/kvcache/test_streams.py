"""What clients can do wrong on Put and Get: every answer is typed, nothing is left behind, nobody else waits."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from katydid_cache import BlockLayout, CacheAdmin, CacheClient, PutBlock, PutOutcome, PutRefusal, PutStatus
from katydid_runtime.errors import (
    ConflictError,
    DeadlineExceededError,
    InternalError,
    KatydidError,
    RequestAbortedError,
    UnsupportedError,
)
from katydid_runtime.rpc_errors import from_rpc_error

from tests.kvcache.running import IDENTITY, LAYOUT, MIB, ServiceProcess, chain, make, run

pytestmark = pytest.mark.e2e

SERVICE = "katydid.kvcache.v1.KvCacheService"
STORED = PutOutcome(PutStatus.STORED)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("disk")
    with ServiceProcess(folder, memory_bytes=2 * MIB) as running:
        yield running


async def attached(channel: grpc.aio.Channel) -> tuple[int, Any]:
    stub: Any = pb_grpc.KvCacheServiceStub(channel)
    layout = pb.BlockLayout(
        version=1, layers=4, kv_heads=2, head_dim=16, block_tokens=64, dtype="bfloat16", block_bytes=LAYOUT.block_bytes
    )
    call = stub.Attach(pb.AttachRequest(identity=IDENTITY, layout=layout))
    return (await call.read()).attached.attachment, call


async def stream(channel: grpc.aio.Channel, method: str, messages: list[bytes]) -> list[bytes]:
    """Send raw messages and close; all answers, or the typed error."""
    call: Any = channel.stream_stream(f"/{SERVICE}/{method}")(iter(messages), timeout=10)
    try:
        return [answer async for answer in call]
    except grpc.aio.AioRpcError as error:
        if error.details() == "Internal error from Core":
            # The library's own word, and not the service's: the call had ended while a message was being written.
            raise RequestAbortedError("the call ended while it was written") from error
        raise from_rpc_error(error) from error


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_sequence_of_messages_breaks_the_service(service: ServiceProcess, data: st.DataObject) -> None:
    """Valid pieces in a wrong order, with wrong numbers, and noise: a typed error or an answer, never INTERNAL."""
    dice = random.Random(data.draw(st.integers(0, 2**32)))
    kinds = data.draw(st.lists(st.sampled_from(["start", "block", "frame", "noise", "credit"]), max_size=6))
    put = data.draw(st.booleans())

    async def scenario() -> None:
        async with grpc.aio.insecure_channel(service.address) as channel:
            attachment, attach = await attached(channel)
            messages = [message(kind, attachment if dice.random() < 0.9 else 1, put, dice) for kind in kinds]
            try:
                await stream(channel, "Put" if put else "Get", messages)
            except InternalError:
                raise
            except KatydidError:
                pass  # any other typed error will do
            attach.cancel()

    run(scenario)
    assert service.process.poll() is None


def message(kind: str, attachment: int, put: bool, dice: random.Random) -> bytes:
    index, offset = dice.choice([0, 0, 0, 1, 2**32 - 1]), dice.choice([0, 0, 5, LAYOUT.block_bytes, 2**63])
    size = dice.choice([0, 1, LAYOUT.block_bytes, MIB + 1])
    heads = pb.HeadRange(first=dice.choice([0, 0, 1, 9]), count=dice.choice([0, 0, 1, 2**32 - 1]))
    if kind == "noise":
        return dice.randbytes(dice.randrange(40))
    if kind == "credit":
        return pb.GetRequest(credit=pb.Credit(bytes=dice.choice([0, 2**63]))).SerializeToString()
    if kind == "frame":
        return pb.PutRequest(frame=pb.Frame(index=index, offset=offset, data=bytes(size))).SerializeToString()
    if kind == "block":
        checksum = bytes(dice.choice([16, 16, 3]))
        block_hash = dice.randbytes(dice.choice([32, 32, 31]))
        block = pb.PutBlock(index=index, hash=block_hash, checksum=checksum, resume=dice.random() < 0.3)
        return pb.PutRequest(block=block).SerializeToString()
    if put:
        return pb.PutRequest(start=pb.PutStart(attachment=attachment, heads=heads)).SerializeToString()
    start = pb.GetStart(
        attachment=attachment,
        hashes=dice.randbytes(dice.choice([0, 32, 64, 33])),
        heads=heads,
        first_layer=dice.choice([0, 0, 3, 4]),
        layers=dice.choice([0, 1, 2**31]),
        credit=dice.choice([0, 2**64 - 1]),
    )
    return pb.GetRequest(start=start).SerializeToString()


def test_unknown_attachment_is_a_typed_error(service: ServiceProcess) -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(service.address) as channel:
            with pytest.raises(ConflictError) as caught:
                await stream(channel, "Put", [pb.PutRequest(start=pb.PutStart(attachment=7)).SerializeToString()])
            assert (caught.value.field, caught.value.value) == ("attachment", "7")

    run(scenario)


def test_the_arena_is_declined_over_tcp_with_a_typed_error(service: ServiceProcess) -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub: Any = pb_grpc.KvCacheServiceStub(channel)
            attachment, _ = await attached(channel)
            commit = stub.Commit(pb.CommitRequest(attachment=attachment))
            for call in (stub.Reserve(pb.ReserveRequest(attachment=attachment)), commit):
                with pytest.raises(grpc.RpcError) as caught:
                    await call
                assert isinstance(from_rpc_error(caught.value), UnsupportedError)

    run(scenario)


def test_a_torn_put_leaves_nothing_behind(service: ServiceProcess) -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(service.address) as channel, CacheClient(service.address) as cache:
            attachment, _ = await attached(channel)
            await cache.attach(IDENTITY, LAYOUT)
            block = make(1)[0]
            messages = [
                pb.PutRequest(start=pb.PutStart(attachment=attachment)),
                pb.PutRequest(block=pb.PutBlock(index=0, hash=block.hash, checksum=bytes(16))),
                pb.PutRequest(frame=pb.Frame(index=0, offset=0, data=bytes(100))),
            ]
            answers = await stream(channel, "Put", [message.SerializeToString() for message in messages])
            result = pb.PutResponse.FromString(answers[-1]).result
            assert (result.status, result.refusal) == (pb.PUT_STATUS_REFUSED, pb.PUT_REFUSAL_INCOMPLETE)
            assert (await cache.lookup(block.hash)).blocks == 0
            assert await cache.put([block]) == [STORED]

    run(scenario)


def test_a_client_that_vanishes_in_mid_put_frees_the_block(service: ServiceProcess) -> None:
    async def scenario() -> None:
        block = make(1)[0]
        async with CacheClient(service.address) as cache:
            await cache.attach(IDENTITY, LAYOUT)
            channel = grpc.aio.insecure_channel(service.address)
            attachment, _ = await attached(channel)
            call: Any = channel.stream_stream(f"/{SERVICE}/Put")()
            for message in (
                pb.PutRequest(start=pb.PutStart(attachment=attachment)),
                pb.PutRequest(block=pb.PutBlock(index=0, hash=block.hash, checksum=bytes(16))),
                pb.PutRequest(frame=pb.Frame(index=0, offset=0, data=bytes(100))),
            ):
                await call.write(message.SerializeToString())
            await call.read()  # credit: the service has begun
            await asyncio.sleep(0.1)
            await channel.close()
            while (outcome := (await cache.put([block]))[0]) == PutOutcome(PutStatus.REFUSED, PutRefusal.BUSY):
                await asyncio.sleep(0.01)
            assert outcome == STORED

    run(scenario)


async def _read_on(call: Any) -> None:
    while True:
        await call.read()


@pytest.mark.parametrize("method", ["Get", "Put"])
def test_a_client_that_stalls_is_cut_off_and_holds_nobody_up(method: str) -> None:
    async def scenario(service: ServiceProcess) -> None:
        async with grpc.aio.insecure_channel(service.address) as channel, CacheClient(service.address) as cache:
            attachment, _ = await attached(channel)
            await cache.attach(IDENTITY, LAYOUT)
            blocks = make(2)
            await cache.put(blocks)
            call: Any = channel.stream_stream(f"/{SERVICE}/{method}")()
            if method == "Get":
                start = pb.GetRequest(start=pb.GetStart(attachment=attachment, hashes=chain(blocks), credit=10))
            else:
                start = pb.PutRequest(start=pb.PutStart(attachment=attachment))
            await call.write(start.SerializeToString())
            await call.read()
            into = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in blocks]
            assert (await cache.get(0, chain(blocks), into=into)).prefix == 2
            with pytest.raises(grpc.RpcError) as caught:
                await _read_on(call)
            assert isinstance(from_rpc_error(caught.value), DeadlineExceededError)

    with ServiceProcess(stream_stall_timeout_s=1.0) as service:
        run(lambda: scenario(service))


def test_a_client_that_gives_credit_and_reads_nothing_pins_nothing_for_long() -> None:
    layout = BlockLayout(layers=8, kv_heads=8, head_dim=64, dtype="bfloat16")
    blocks = [PutBlock(os.urandom(32), b"", os.urandom(layout.block_bytes)) for _ in range(24)]

    async def scenario(service: ServiceProcess) -> None:
        async with (
            CacheClient(service.address) as cache,
            CacheAdmin(service.address) as admin,
            grpc.aio.insecure_channel(service.address) as channel,
        ):
            await cache.attach(IDENTITY, layout)
            assert {outcome.status for outcome in await cache.put(blocks)} == {STORED.status}
            attachment = cache._attachment.require()
            call: Any = channel.stream_stream(f"/{SERVICE}/Get")()
            start = pb.GetStart(attachment=attachment, hashes=b"".join(block.hash for block in blocks), credit=2**40)
            await call.write(pb.GetRequest(start=start).SerializeToString())
            await call.read()
            dropped = await admin.evict(IDENTITY)
            assert dropped < len(blocks), "the stream holds what it is about to send"
            async with asyncio.timeout(10):
                while dropped < len(blocks):
                    await asyncio.sleep(0.1)
                    dropped += await admin.evict(IDENTITY)

    with ServiceProcess(memory_bytes=32 * MIB, slab_bytes=4 * MIB, stream_stall_timeout_s=1.0) as service:
        run(lambda: scenario(service))
