"""The cache client: one channel, one attachment, and a call for every verb of the service.

Every call has a deadline and raises errors of `katydid_runtime.errors`. Built with `degrade=True`, a service that is
dead, slow or draining costs its bounded time once and then looks like an empty cache: lookups and reads miss, writes
are refused as STORE_UNAVAILABLE, nothing raises but wrong arguments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from katydid_runtime.bearer import headers, interceptors
from katydid_runtime.channel import CHANNEL_OPTIONS, open_channel
from katydid_runtime.duration import to_duration, to_seconds
from katydid_runtime.errors import ConflictError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from katydid_runtime.tls import Tls
from katydid_runtime.trace_context import TraceContext

from katydid_cache import resuming
from katydid_cache.answering import Answering, unanswered
from katydid_cache.arena import ArenaMapping
from katydid_cache.arena_copies import ArenaCopies
from katydid_cache.arena_slots import ArenaSlots
from katydid_cache.asking import signed
from katydid_cache.attachment import Attachment, attach_request
from katydid_cache.get_call import GetCall, byte_buffers
from katydid_cache.in_place import InPlace
from katydid_cache.lane_reads import LaneReads, dialled_host
from katydid_cache.layout import BlockLayout, Span
from katydid_cache.local_calls import LocalCalls, NearCalls
from katydid_cache.pulls import Pulls
from katydid_cache.put_call import PutCall, PutTerms, check_payloads, put_start
from katydid_cache.records import (
    BlockMissReason,
    CacheStats,
    Durability,
    GetResult,
    LookupResult,
    PrefetchResult,
    PutBlock,
    PutOutcome,
    PutRefusal,
    PutStatus,
    Tier,
    TierRun,
    TierTime,
    WatchEvent,
)
from katydid_cache.stats import cache_stats
from katydid_cache.watching import block_events

__all__ = ["CHANNEL", "CacheClient"]

CHANNEL = (
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
"""Options of a channel to the cache service: it is looked for again every second at least."""

_SERVICE = pb.DESCRIPTOR.services_by_name["KvCacheService"].full_name
_HOPELESS = (UnauthenticatedError, PermissionDeniedError)
_UNDECIDED = PutOutcome(PutStatus.REFUSED, PutRefusal.STORE_UNAVAILABLE)


class CacheClient:
    """Talks to the cache service at `address` (`host:port` or `unix:/path`); belongs to one event loop.

    `name` shows in the service's logs. See the module's first lines for `degrade`; `tls` None is plain text; `token` is
    for a service that asks for one; large reads take up to `lanes` bulk lanes where the service has them.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str = "",
        degrade: bool = False,
        tls: Tls | None = None,
        token: str | None = None,
        lanes: int = 1,
    ) -> None:
        self._address = address
        self._name = name
        self._degrade = degrade
        self._token = token
        answering = Answering(address, lambda: self._attachment, degrade=degrade)
        self._answer, self._call = answering.answer, answering.call
        self._channel = open_channel(address, tls, CHANNEL, interceptors(token))
        self._stub: Any = pb_grpc.KvCacheServiceStub(self._channel)
        # Without serialisers: frames are encoded by hand.
        self._get_call: Any = self._channel.stream_stream(f"/{_SERVICE}/Get")
        self._put_call: Any = self._channel.stream_stream(f"/{_SERVICE}/Put")
        self._attachment: Attachment | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._layout: BlockLayout | None = None
        self._copies = ArenaCopies()
        self._near = NearCalls(self._stub, self._local, headers(token) or ())
        host = dialled_host(address)
        self._lanes = LaneReads(host or "", lanes if host else 0)
        self.pulls = Pulls(self._stub, self._call, self._answer)

    @property
    def attached(self) -> bool:
        """Whether calls have a chance now; False while the service is away and re-attachment is tried."""
        return self._attachment is not None and self._attachment.usable

    @property
    def boot_epoch(self) -> int:
        """Epoch of the service last attached to; leases do not survive a change. 0 before the first attachment."""
        return 0 if self._attachment is None else self._attachment.boot_epoch

    @property
    def peer_address(self) -> str:
        """Where other hosts reach the service; empty: nowhere."""
        return "" if self._attachment is None else self._attachment.peer_address

    @property
    def lane_port(self) -> int:
        """TCP port of the service's bulk lanes; 0 without any."""
        return 0 if self._attachment is None else self._attachment.lane_port

    @property
    def arena(self) -> ArenaMapping | None:
        """The service's memory as mapped now; None without one, a new one after every re-attachment."""
        return None if self._attachment is None else self._attachment.arena

    @property
    def in_place(self) -> InPlace:
        """Reading and writing in the service's shared memory; for clients attached with `arena=True`."""
        size = self._known_layout().block_bytes
        return InPlace(self._near, self._answer, lambda: self.arena, size)

    async def attach(
        self, identity: bytes, layout: BlockLayout, *, arena: bool = False, timeout_s: float = 5.0
    ) -> bool:
        """Join the namespace of `identity` (32 bytes) and stay joined, re-attaching after the service's death.

        `arena` asks for the shared memory, which services on a Unix socket grant: blocks go through it then, and only
        what it can't do goes in streams.

        Returns whether the service answered within `timeout_s`; without `degrade` raises UnavailableError instead, and
        in both cases goes on trying. Raises IdentityMismatchError when the identity is known with another layout,
        ConflictError when the client is attached already; without `degrade` also UnauthenticatedError and
        PermissionDeniedError at once.
        """
        if self._attachment is not None:
            raise ConflictError("this client is attached already; one client is one namespace")
        request = attach_request(self._name, identity, layout, arena=arena)
        self._layout = layout
        self._attachment = Attachment(self._stub, request, self._address)
        self._keeping = asyncio.create_task(self._attachment.keep())
        answered = await self._attachment.first(timeout_s, () if self._degrade else _HOPELESS)
        if not answered and not self._degrade:
            why = "" if self._attachment.failure is None else f": {self._attachment.failure}"
            raise UnavailableError(f"the cache service at {self._address} did not answer within {timeout_s:g} s{why}")
        return answered

    async def lookup(
        self,
        hashes: bytes,
        *,
        before: bytes = b"",  # noqa: ARG002 - for a fleet: one instance needs no placement
        lease: bool = True,
        lease_ttl_s: float | None = None,
        heads: Span = Span(),
        timeout_s: float = 1.0,
        trace: TraceContext | None = None,
    ) -> LookupResult:
        """The longest prefix of the chain `hashes` (packed, 32 bytes a hash, 4,096 hashes at most) that is present."""

        async def call(attachment: int) -> LookupResult:
            request = pb.LookupRequest(attachment=attachment, hashes=hashes, lease=lease, heads=_head_range(heads))
            if lease_ttl_s is not None:
                request.lease_ttl.CopyFrom(to_duration(lease_ttl_s))
            response = await self._near.Lookup(signed(request), timeout=timeout_s, metadata=headers(None, trace))
            runs = tuple(TierRun(Tier(run.tier), run.blocks, to_seconds(run.eta)) for run in response.runs)
            slots = ArenaSlots(response.slots, response.checksums, response.linear_checksums)
            if slots and (mapping := self.arena) is not None:
                self._copies.remember(response.lease, mapping, hashes, runs, slots)
            return LookupResult(response.blocks, runs, response.lease, to_seconds(response.duration), slots=slots)

        return await self._answer(call, lambda: LookupResult(reachable=False))

    async def get(
        self,
        lease: int,
        hashes: bytes,
        *,
        into: Sequence[memoryview],
        heads: Span = Span(),
        layers: Span = Span(),
        timeout_s: float = 30.0,
        trace: TraceContext | None = None,
    ) -> GetResult:
        """Read blocks into the caller's buffers, one of `layout.payload_bytes(heads, layers)` bytes for each hash.

        Buffers may be written partly even when the block ends as a miss. `lease` 0 reads without one. What a lookup
        under `lease` found in the shared memory is copied from there. A stream that breaks is resumed where it broke
        if the service is back within a moment. Raises InvalidRequestError when the buffers don't fit.
        """
        layout = self._known_layout()
        buffers = byte_buffers(into, len(hashes), layout.payload_bytes(heads, layers))
        receiving = GetCall(hashes, buffers)
        deadline = time.monotonic() + timeout_s
        if (mapping := self.arena) is not None:
            started = time.monotonic()
            with suppress(UnavailableError):  # what is read by stream below says so
                found = await self._copies.get(lease, mapping, hashes, buffers, layout, heads, layers)
                receiving.take_over(found, [TierTime(Tier.MEMORY, sum(found), time.monotonic() - started)])
        if self.lane_port and not heads.count and not layers.count and self._lanes.usable(sum(map(len, buffers))):
            left_s = max(0.0, deadline - time.monotonic())
            found, times = await self._lanes.get(
                self.pulls.open_lane, self.lane_port, hashes, buffers, receiving.missing, left_s
            )
            receiving.take_over(found, times)
        if receiving.complete:
            return receiving.result(BlockMissReason.ABSENT)

        def stream() -> Any:
            timeout = max(0.0, deadline - time.monotonic())
            return self._get_call(timeout=timeout, metadata=headers(self._token, trace))

        async def call(attachment: int) -> GetResult:
            start = pb.GetStart(attachment=attachment, lease=lease, first_layer=layers.first, layers=layers.count)
            start.heads.CopyFrom(_head_range(heads))
            await receiving.run(stream, signed(start), self._attached_again)
            return receiving.result(BlockMissReason.ABSENT)

        return await self._answer(call, lambda: receiving.result(BlockMissReason.STORE_UNAVAILABLE))

    async def put(
        self,
        blocks: Sequence[PutBlock],
        *,
        durability: Durability = Durability.MEMORY,
        heads: Span = Span(),
        tenant: bytes = b"",
        ttl_s: float | None = None,
        sliding: bool = False,
        hold_s: float | None = None,
        timeout_s: float = 30.0,
        trace: TraceContext | None = None,
    ) -> list[PutOutcome]:
        """Write blocks; one outcome each, in order. A payload holds the runs of `heads` in layout order.

        `ttl_s` counts from the write, with `sliding` from the last use. Raises InvalidRequestError when a payload has
        another size.
        """
        layout = self._known_layout()
        check_payloads(blocks, layout.payload_bytes(heads))
        terms = PutTerms(durability, heads, tenant, ttl_s, sliding, hold_s, time.monotonic() + timeout_s)
        if self.arena is not None:
            outcomes = await self._answer(
                lambda _: self._copies.put(self.in_place, layout, blocks, terms), lambda: [_UNDECIDED] * len(blocks)
            )
            # A block that is there already may not be on disk yet: a stream waits for that without sending it.
            waiting = [index for index, outcome in enumerate(outcomes) if outcome.status is PutStatus.PRESENT]
            if durability is Durability.MEMORY or not waiting:
                return outcomes
            blocks = [blocks[index] for index in waiting]
        else:
            outcomes, waiting = [_UNDECIDED] * len(blocks), [*range(len(blocks))]
        sending = PutCall(blocks, self._attachment.frame_bytes if self._attachment else 0)

        def stream() -> Any:
            timeout = max(0.0, terms.deadline - time.monotonic())
            return self._put_call(timeout=timeout, metadata=headers(self._token, trace))

        async def call(attachment: int) -> list[PutOutcome]:
            start = put_start(attachment, terms)
            await sending.run(stream, start, self._attached_again)
            return sending.outcomes(PutRefusal.STORE_UNAVAILABLE)

        streamed = await self._answer(call, lambda: sending.outcomes(PutRefusal.STORE_UNAVAILABLE))
        for index, outcome in zip(waiting, streamed, strict=True):
            outcomes[index] = outcome
        return outcomes

    async def release(self, lease: int, *, timeout_s: float = 1.0) -> None:
        """Give a lease back. A lease that ran out, or died with the service, is no error."""
        if not lease:
            return
        self._copies.forget(lease)

        async def call(attachment: int) -> None:
            await self._near.Release(pb.ReleaseRequest(attachment=attachment, lease=lease), timeout=timeout_s)

        await self._answer(call, lambda: None)

    async def report(self, hashes: bytes, *, timeout_s: float = 1.0) -> int:
        """Name blocks that did not have their checksum where they were read in place; how many were quarantined."""

        async def call(attachment: int) -> int:
            request = pb.ReportRequest(attachment=attachment, hashes=hashes)
            response = await self._stub.Report(signed(request), timeout=timeout_s)
            return int(response.quarantined)

        return await self._answer(call, lambda: 0)

    async def prefetch(
        self, hashes: bytes, *, deadline_s: float = 1.0, wait: bool = False, timeout_s: float = 1.0
    ) -> PrefetchResult:
        """Ask for blocks to be moved up into memory; not worth anything after `deadline_s`.

        `wait` answers when they are there or the deadline has passed, and with an arena tells where they are;
        `timeout_s` then counts from there on. Cancelling the call ends the work.
        """

        async def call(attachment: int) -> PrefetchResult:
            request = pb.PrefetchRequest(
                attachment=attachment, hashes=hashes, deadline=to_duration(deadline_s), wait=wait
            )
            response = await self._stub.Prefetch(signed(request), timeout=timeout_s + deadline_s * wait)
            slots = ArenaSlots(response.slots, response.checksums, response.linear_checksums)
            return PrefetchResult(response.blocks, to_seconds(response.eta), slots)

        return await self._answer(call, lambda: PrefetchResult(0, 0.0))

    async def stats(self, *, timeout_s: float = 1.0) -> CacheStats:
        """Figures of the service since its start. Needs no attachment, and raises whatever `degrade` says."""
        try:
            response = await self._stub.Stats(pb.StatsRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise unanswered(error, self._address, timeout_s) from error
        return cache_stats(response)

    async def watch(self, identity: bytes) -> AsyncIterator[WatchEvent]:
        """Block events of a namespace: a snapshot in parts, then changes. A lost stream ends it with an error."""
        with _open(self._stub.Watch(pb.WatchRequest(identity=identity))) as call:
            async for event in block_events(call):
                yield event
        raise UnavailableError(f"the cache service at {self._address} ended the watch")

    async def close(self) -> None:
        """Leave the namespace; the service drops the leases. Calls in flight end with an error."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._channel.close()
        self._copies.close()
        self._lanes.close()

    async def __aenter__(self) -> CacheClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _local(self) -> LocalCalls | None:
        return None if self._attachment is None else self._attachment.local

    async def _attached_again(self) -> int:
        """The attachment to go on with after a stream broke; 0 when none comes soon."""
        return 0 if self._attachment is None else await self._attachment.again(resuming.RESUME_S)

    def _known_layout(self) -> BlockLayout:
        if self._layout is None:
            raise ConflictError("attach first: the layout of a block is not known")
        return self._layout


@contextmanager
def _open(call: Any) -> Iterator[Any]:
    """A streaming call that does not outlive its block."""
    try:
        yield call
    finally:
        call.cancel()


def _head_range(heads: Span) -> pb.HeadRange:
    return pb.HeadRange(first=heads.first, count=heads.count)
