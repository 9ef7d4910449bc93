"""What one instance asks of another, and a client of an instance about another: lanes opened, blocks pulled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.block_hash import HASH_BYTES
from katydid_runtime.duration import to_duration, to_seconds

from katydid_cache.asking import signed
from katydid_cache.get_call import tier_time
from katydid_cache.in_place import Answer
from katydid_cache.lane import CHECKSUM_BYTES
from katydid_cache.records import BlockMissReason, TierTime

__all__ = ["LaneOffer", "PullResult", "Pulls"]

T = TypeVar("T")


class Call(Protocol):
    """How the client calls the service with its attachment; failures are raised."""

    def __call__(self, call: Callable[[int], Awaitable[T]]) -> Awaitable[T]: ...


class LaneOffer(NamedTuple):
    """Blocks that wait for who shows `token`: their `checksums` in order; `misses` by place in the request.

    `times` tells from which tiers the service has them.
    """

    token: bytes
    checksums: tuple[bytes, ...]
    misses: Mapping[int, BlockMissReason]
    times: tuple[TierTime, ...] = ()


class PullResult(NamedTuple):
    """Blocks an instance fetched, had already, and could not get."""

    pulled: int
    present: int
    missed: int
    duration_s: float = 0.0


class Pulls:
    """The side of a client that prepares lanes and has its service pull."""

    def __init__(self, stub: Any, call: Call, answer: Answer) -> None:
        self._stub = stub
        self._call = call
        self._answer = answer

    async def open_lane(self, hashes: bytes, *, timeout_s: float = 10.0) -> LaneOffer:
        """Have blocks wait for whoever shows the token at the lane port. Raises what goes wrong, whatever `degrade`."""

        async def call(attachment: int) -> LaneOffer:
            request = pb.OpenLaneRequest(attachment=attachment, hashes=hashes)
            response = await self._stub.OpenLane(signed(request), timeout=timeout_s)
            packed = response.checksums
            checksums = (packed[at : at + CHECKSUM_BYTES] for at in range(0, len(packed), CHECKSUM_BYTES))
            misses = {miss.index: BlockMissReason(miss.reason) for miss in response.misses}
            return LaneOffer(response.token, tuple(checksums), misses, tuple(map(tier_time, response.times)))

        return await self._call(call)

    async def pull(
        self, source: str, hashes: bytes, *, parents: bytes = b"", tenant: bytes = b"", deadline_s: float = 10.0
    ) -> PullResult:
        """Have this instance fetch blocks from the one at `source`. Without `parents` (packed) they are one chain.

        `tenant` is whose they are, by default who the call is made for.
        """

        async def call(attachment: int) -> PullResult:
            request = pb.PullRequest(
                attachment=attachment,
                source=source,
                hashes=hashes,
                parents=parents or bytes(HASH_BYTES) + hashes[:-HASH_BYTES],
                tenant=tenant,
                deadline=to_duration(deadline_s),
            )
            response = await self._stub.Pull(signed(request), timeout=deadline_s + 1.0)
            return PullResult(response.pulled, response.present, response.missed, to_seconds(response.duration))

        return await self._answer(call, lambda: PullResult(0, 0, len(hashes) // HASH_BYTES))
