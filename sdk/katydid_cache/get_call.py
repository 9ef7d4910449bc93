"""The client's half of a Get: frames go straight into the caller's buffers, checked before they count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.block_hash import HASH_BYTES
from katydid_runtime.duration import to_seconds
from katydid_runtime.errors import DataCorruptError, InvalidRequestError
from xxhash import xxh3_128_digest

from katydid_cache.records import BlockMissReason, GetResult, Tier, TierTime
from katydid_cache.wire import Frame, decode_get_response

__all__ = ["WINDOW_BYTES", "GetCall", "byte_buffers"]

WINDOW_BYTES = 16 * 1024 * 1024


class GetCall:
    """Receives one Get into `into`. `result` can be asked for at any time, also after a failure."""

    def __init__(self, into: Sequence[memoryview]) -> None:
        self._into = into
        self._headers: dict[int, pb.BlockHeader] = {}
        self._received = [0] * len(into)
        self._found = [False] * len(into)
        self._misses: dict[int, BlockMissReason] = {}
        self._times: tuple[TierTime, ...] = ()

    async def run(self, call: Any, start: pb.GetStart) -> None:
        """Serve `call` to its end. Raises grpc.RpcError, and DataCorruptError for an answer that makes no sense."""
        start.credit = WINDOW_BYTES
        await call.write(pb.GetRequest(start=start).SerializeToString())
        consumed = 0
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                raise DataCorruptError("the service ended a Get without a summary")
            response = decode_get_response(message)
            if isinstance(response, Frame):
                self._frame(response)
                consumed += len(response.data)
                if consumed >= WINDOW_BYTES // 2:
                    await call.write(pb.GetRequest(credit=pb.Credit(bytes=consumed)).SerializeToString())
                    consumed = 0
                continue
            kind = response.WhichOneof("message")
            if kind == "block":
                self._block(response.block)
            elif kind == "miss":
                self._check_index(response.miss.index)
                self._misses[response.miss.index] = BlockMissReason(response.miss.reason)
            elif kind == "summary":
                self._times = tuple(_tier_time(time) for time in response.summary.times)
                await call.done_writing()
                await call.read()
                return

    def result(self, unanswered: BlockMissReason) -> GetResult:
        """What arrived; blocks that were not answered are misses with the reason `unanswered`."""
        missing = {index: unanswered for index, found in enumerate(self._found) if not found}
        return GetResult(tuple(self._found), missing | self._misses, self._times)

    def _block(self, header: pb.BlockHeader) -> None:
        self._check_index(header.index)
        if header.bytes != len(self._into[header.index]):
            raise DataCorruptError(f"block {header.index} has {header.bytes} bytes, its buffer another size")
        self._headers[header.index] = header

    def _frame(self, frame: Frame) -> None:
        header = self._headers.get(frame.index)
        if header is None:
            raise DataCorruptError(f"a frame of block {frame.index} without its header")
        end = frame.offset + len(frame.data)
        if frame.offset != self._received[frame.index] or end > header.bytes:
            raise DataCorruptError(f"a frame of block {frame.index} at {frame.offset} is out of place")
        buffer = self._into[frame.index]
        buffer[frame.offset : end] = frame.data
        self._received[frame.index] = end
        if end == header.bytes:
            if xxh3_128_digest(buffer) == header.checksum:
                self._found[frame.index] = True
            else:
                self._misses[frame.index] = BlockMissReason.CORRUPT

    def _check_index(self, index: int) -> None:
        if index >= len(self._into):
            raise DataCorruptError(f"an answer for block {index}, which was not asked for")


def _tier_time(time: pb.TierTime) -> TierTime:
    return TierTime(Tier(time.tier), time.blocks, to_seconds(time.duration))


def byte_buffers(into: Sequence[memoryview], packed_bytes: int, size: int) -> list[memoryview]:
    """The caller's buffers as bytes, one a hash. Raises InvalidRequestError for one that does not fit."""
    if packed_bytes != HASH_BYTES * len(into):
        raise InvalidRequestError(
            f"{len(into)} buffers for {packed_bytes} bytes of hashes",
            field="into",
            value=len(into),
            allowed=f"one buffer for each {HASH_BYTES} bytes",
        )
    buffers = [memoryview(buffer).cast("B") for buffer in into]
    for index, buffer in enumerate(buffers):
        if len(buffer) != size or buffer.readonly:
            raise InvalidRequestError(
                f"buffer {index} has {len(buffer)} bytes{' and is read-only' if buffer.readonly else ''}",
                field=f"into[{index}]",
                value=len(buffer),
                allowed=f"{size} writable bytes",
            )
    return buffers
