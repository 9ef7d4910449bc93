"""KvCacheService over gRPC: translates between the protocol and the cache, and nothing more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import grpc
from google.protobuf.message_factory import GetMessageClass
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache.records import Snapshot
from katydid_runtime.duration import to_duration
from katydid_runtime.errors import ConflictError, DeadlineExceededError, InvalidRequestError
from katydid_runtime.telemetry import Span, Telemetry
from katydid_runtime.trace_context import TraceContext

from katydid_kvcache import requests
from katydid_kvcache.arena_socket import ArenaSocket
from katydid_kvcache.cache import Cache
from katydid_kvcache.figures import Figures
from katydid_kvcache.get_stream import GetStream
from katydid_kvcache.in_place_calls import PackedSlots, commit_in_place, reserve_in_place
from katydid_kvcache.lanes.calls import LaneCalls
from katydid_kvcache.local_calls import Handler
from katydid_kvcache.put_stream import PutStream
from katydid_kvcache.stats_reply import stats_reply

__all__ = ["LONG_LIVED", "SERVICE", "KvCacheService", "local_handlers", "rpc_handlers"]

_DESCRIPTOR = pb.DESCRIPTOR.services_by_name["KvCacheService"]
SERVICE = _DESCRIPTOR.full_name
LONG_LIVED = (f"/{SERVICE}/Attach", f"/{SERVICE}/Watch")
_RAW = frozenset({"Get", "Put"})
_IDENTITY_BYTES = 32
_PREFETCH_LIMIT_S = 600.0
_READ_OUT_S = 0.1

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

logger = logging.getLogger(__name__)


class KvCacheService:
    """The RPCs of KvCacheService; see the protocol for what each one means."""

    def __init__(
        self,
        cache: Cache,
        telemetry: Telemetry,
        figures: Figures,
        arena: ArenaSocket | None = None,
        *,
        lane_port: int = 0,
        peer_address: str = "",
    ) -> None:
        self._cache = cache
        self._telemetry = telemetry
        self._figures = figures
        self._arena = arena
        self._lane_port = lane_port
        self._peer_address = peer_address
        self._delays = cache.settings.fault_delays

    async def Attach(self, request: pb.AttachRequest, context: Context) -> AsyncIterator[pb.AttachResponse]:
        cache = self._cache
        identity = requests.exact_bytes(request.identity, (_IDENTITY_BYTES,), "identity")
        namespace = cache.store.namespace(identity, requests.layout(request.layout))
        granted = request.want_arena and self._arena is not None and context.peer().startswith("unix")
        attachment = cache.attachments.join(namespace, arena=granted)
        if cache.shared is not None:
            cache.shared.refresh()
        who = {"client": request.client, "identity": identity.hex()[:16], "arena": granted}
        logger.info("client attached", extra=who)
        attached = pb.Attached(
            attachment=attachment.id,
            boot_epoch=cache.boot_epoch,
            frame_bytes=requests.FRAME_BYTES,
            lane_port=self._lane_port,
            peer_address=self._peer_address,
        )
        try:
            if granted and self._arena is not None:
                attached.arena.CopyFrom(
                    pb.Arena(
                        socket_path=self._arena.path,
                        token=await self._arena.issue(),
                        bytes=cache.arena.bytes,
                        slot_bytes=namespace.slot_bytes,
                    )
                )
            yield pb.AttachResponse(attached=attached)
            await cache.attachments.draining.wait()
            yield pb.AttachResponse(notice=pb.Notice(draining=True))
            await asyncio.Event().wait()
        finally:
            cache.detach(attachment)
            logger.info("client gone", extra=who)
            if self._arena is not None:
                self._arena.revoke(attached.arena.token)

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        started = time.monotonic()
        with self._span("kvcache.service.lookup", context) as span:
            attachment = self._cache.attachments.find(request.attachment)
            hashes = requests.hash_list(request.hashes)
            longest_s = self._cache.settings.lease_ttl_s
            ttl_s = longest_s
            if request.HasField("lease_ttl"):
                ttl_s = requests.seconds(request.lease_ttl, "lease_ttl", limit=longest_s)
            await self._delay("lookup")
            found = self._cache.lookup(
                attachment,
                hashes,
                requests.span(request.heads),
                ttl_s if request.lease else None,
                requests.asker(request.tenant, request.session.id),
                requests.session(request.session),
            )
            span.set_all({"kvcache.blocks.asked": len(hashes), "kvcache.blocks.found": len(found.blocks)})
        # In place only what is leased and whole: a slot without a lease may be another block's a moment later.
        in_place = attachment.arena and found.lease and attachment.namespace.covers(requests.span(request.heads))
        packed = PackedSlots(found.rows if in_place else b"")
        elapsed_s = time.monotonic() - started
        self._figures.lookup_seconds.observe(elapsed_s)
        return pb.LookupResponse(
            blocks=len(found.blocks),
            slots=packed.slots,
            checksums=packed.checksums,
            linear_checksums=packed.linear_checksums,
            runs=[
                pb.TierRun(tier=pb.Tier.ValueType(run.tier), blocks=run.blocks, eta=to_duration(run.eta_s))
                for run in found.runs
            ],
            lease=found.lease,
            boot_epoch=self._cache.boot_epoch,
            duration=to_duration(elapsed_s),
        )

    async def Get(self, messages: AsyncIterator[bytes], context: Context) -> None:
        started = time.monotonic()
        with self._span("kvcache.service.get", context) as span:
            await self._delay("get")
            stream = GetStream(self._cache, messages, self._write(context))
            try:
                await stream.run()
            except (InvalidRequestError, ConflictError):
                await _read_out(messages)
                raise
            finally:
                span.set_all(
                    {
                        "kvcache.blocks.sent": stream.sent,
                        "kvcache.blocks.missed": stream.missed,
                        "kvcache.bytes": stream.bytes,
                    }
                )
                self._cache.traffic.sent_bytes += stream.bytes
        self._figures.get_seconds.observe(time.monotonic() - started)

    async def Put(self, messages: AsyncIterator[bytes], context: Context) -> None:
        started = time.monotonic()
        with self._span("kvcache.service.put", context) as span:
            stream = PutStream(self._cache, messages, self._write(context))
            try:
                await stream.run()
            except (InvalidRequestError, ConflictError):
                await _read_out(messages)
                raise
            finally:
                span.set_all({"kvcache.blocks.stored": stream.stored, "kvcache.bytes": stream.bytes})
                self._cache.traffic.received_bytes += stream.bytes
        self._figures.put_seconds.observe(time.monotonic() - started)

    async def Reserve(self, request: pb.ReserveRequest, _context: Context) -> pb.ReserveResponse:
        return reserve_in_place(self._cache, request)

    async def Commit(self, request: pb.CommitRequest, _context: Context) -> pb.CommitResponse:
        return await commit_in_place(self._cache, request)

    async def Prefetch(self, request: pb.PrefetchRequest, _context: Context) -> pb.PrefetchResponse:
        attachment = self._cache.attachments.find(request.attachment)
        deadline_s = requests.seconds(request.deadline, "deadline", limit=_PREFETCH_LIMIT_S)
        asker = requests.asker(request.tenant, request.session)
        hashes = self._cache.names(asker, requests.hash_list(request.hashes))
        if not request.wait:
            blocks, eta_s = self._cache.prefetching.start(attachment.id, attachment.namespace, hashes, deadline_s)
            return pb.PrefetchResponse(blocks=blocks, eta=to_duration(eta_s))
        there = await self._cache.prefetching.fetch(attachment.namespace, hashes, deadline_s)
        packed = PackedSlots(b"".join(block.row for block in there) if attachment.arena else b"")
        return pb.PrefetchResponse(
            blocks=len(there),
            slots=packed.slots,
            checksums=packed.checksums,
            linear_checksums=packed.linear_checksums,
        )

    async def Release(self, request: pb.ReleaseRequest, _context: Context) -> pb.ReleaseResponse:
        self._cache.release(self._cache.attachments.find(request.attachment), request.lease)
        return pb.ReleaseResponse()

    async def Report(self, request: pb.ReportRequest, _context: Context) -> pb.ReportResponse:
        namespace = self._cache.attachments.find(request.attachment).namespace
        asker = requests.asker(request.tenant, request.session)
        names = self._cache.names(asker, requests.hash_list(request.hashes))
        return pb.ReportResponse(quarantined=await self._cache.scrubber.look_at(namespace, names))

    async def Stats(self, _request: pb.StatsRequest, _context: Context) -> pb.StatsResponse:
        return stats_reply(self._cache)

    async def Watch(self, request: pb.WatchRequest, _context: Context) -> AsyncIterator[pb.WatchResponse]:
        identity = requests.exact_bytes(request.identity, (_IDENTITY_BYTES,), "identity")
        async for event in self._cache.events.watch(identity):
            response = pb.WatchResponse(boot_epoch=event.boot_epoch, sequence=event.sequence)
            tier = pb.Tier.ValueType(event.tier)
            if isinstance(event, Snapshot):
                response.snapshot.CopyFrom(pb.BlockSnapshot(tier=tier, hashes=event.hashes, last=event.last))
            else:
                response.delta.CopyFrom(pb.BlockDelta(tier=tier, stored=event.stored, removed=event.removed))
            yield response

    def _write(self, context: Context) -> Callable[[bytes], Awaitable[None]]:
        """`context.write` for as long as the client reads; raises DeadlineExceededError when it does not."""
        stall_s = self._cache.settings.stream_stall_timeout_s

        async def write(message: bytes) -> None:
            try:
                async with asyncio.timeout(stall_s):
                    await context.write(message)
            except TimeoutError:
                raise DeadlineExceededError(f"the client read nothing for {stall_s:g} s") from None

        return write

    def _span(self, name: str, context: Context) -> Span:
        return self._telemetry.start(name, TraceContext.from_headers(context.invocation_metadata() or ()))

    async def _delay(self, point: str) -> None:
        if (seconds := self._delays.get(point, 0.0)) > 0:
            await asyncio.sleep(seconds)


async def _read_out(messages: AsyncIterator[bytes]) -> None:
    """Read on for a moment before refusing a stream: a client in mid-write would see its write fail, not the reason."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_READ_OUT_S):
            async for _ in messages:
                pass


def local_handlers(service: KvCacheService) -> Mapping[str, Handler]:
    """The calls that go with blocks in place, for `LocalConnection`."""
    methods = _DESCRIPTOR.methods_by_name
    return {
        name: Handler(f"/{SERVICE}/{name}", GetMessageClass(methods[name].input_type), getattr(service, name))
        for name in ("Lookup", "Reserve", "Commit", "Release")
    }


def rpc_handlers(service: KvCacheService, lanes: LaneCalls) -> grpc.GenericRpcHandler:
    """The service for `Server.add_generic_rpc_handlers`. Get and Put pass serialised messages as they are."""
    handlers = {}
    for method in _DESCRIPTOR.methods:
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        raw = method.name in _RAW
        handlers[method.name] = getattr(grpc, f"{kind}_rpc_method_handler")(
            getattr(lanes if hasattr(lanes, method.name) else service, method.name),
            request_deserializer=None if raw else GetMessageClass(method.input_type).FromString,
            response_serializer=None if raw else GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(SERVICE, handlers)
