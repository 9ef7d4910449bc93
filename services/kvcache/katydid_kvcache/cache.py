"""The cache as one object: tiers, index, leases and events wired together, without a word of gRPC."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb
from katydid_cache.asking import Asker
from katydid_cache.layout import Span
from katydid_cache.records import PutRefusal, Tier, TierRun
from katydid_runtime.errors import ConflictError, NotFoundError, SettingsError

from katydid_kvcache.aftermath import Aftermath
from katydid_kvcache.arena import host_memory_bytes
from katydid_kvcache.attachments import Attachment, Attachments
from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.disk.catalog import Row
from katydid_kvcache.disk.recovery import DiskFolder, lock_folder, open_folder
from katydid_kvcache.disk.restoring import restore, without_collections
from katydid_kvcache.events import EventHub
from katydid_kvcache.half_writes import HalfWrites
from katydid_kvcache.leases import LeaseTable
from katydid_kvcache.pins import OperatorPins
from katydid_kvcache.policy.lifetimes import Lifetime, Lifetimes, SessionTerms
from katydid_kvcache.policy.policy_file import CachePolicy
from katydid_kvcache.policy.sharing import stored_names
from katydid_kvcache.prefetching import Prefetching
from katydid_kvcache.read_speeds import ReadSpeeds
from katydid_kvcache.reading import Reader
from katydid_kvcache.reservations import Reservations
from katydid_kvcache.scrubbing import Scrubber
from katydid_kvcache.settings import KvCacheSettings
from katydid_kvcache.shared.backend import Backend, open_backend
from katydid_kvcache.shared.manifest import Entry
from katydid_kvcache.store import Change, Refusal, Write
from katydid_kvcache.tenants import Tenants
from katydid_kvcache.tier_runs import tier_runs
from katydid_kvcache.tiers import make_tiers
from katydid_kvcache.traffic import Traffic
from katydid_kvcache.writing import Writer

__all__ = ["Cache", "Found"]

_MAINTENANCE_S = 1.0
_REGROW_S = 60.0
_SERVICE_OWNER = 0
_EVICT_BLOCKS = 512
# An answer to Reserve that came too late leaves slots with a client that does not know of them.
_RESERVATION_S = 120.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """Outcome of a lookup: the prefix's blocks, by tier in runs, and the lease over them (0: none).

    `rows` has the ROW of those that are in memory, back to back.
    """

    blocks: Sequence[Block]
    runs: tuple[TierRun, ...]
    lease: int
    rows: bytes


class Cache:
    """All state of one service; made by `Cache.open`, ended by `close`. Belongs to one event loop."""

    def __init__(
        self,
        settings: KvCacheSettings,
        policy: CachePolicy,
        folder: DiskFolder | None,
        lock: int | None,
        backend: Backend | None = None,
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.boot_epoch = time.time_ns()
        self.attachments = Attachments()
        self.speeds = ReadSpeeds()
        self.traffic = Traffic()
        self._lock = lock
        tiers = make_tiers(
            settings,
            policy,
            folder,
            backend,
            self.speeds,
            namespaces=self.attachments.namespaces,
            changed=self._changed,
            renewed=self._renewed,
        )
        self.store, self.arena, self.memory = tiers.store, tiers.arena, tiers.memory
        self.shared, self._disk = tiers.shared, tiers.disk
        self.events = EventHub(self.store, self.boot_epoch)
        self._lifetimes = Lifetimes(policy.blocks or Lifetime(settings.block_ttl_s), policy.sessions, time.time)
        self.reader = Reader(self.store, self.memory, self._disk, self.shared, self._sink)
        self.scrubber = Scrubber(self.store, self.memory, self.reader)
        self.writer = Writer(
            self.store,
            self.memory,
            self._disk,
            queue_bytes=settings.disk_queue_bytes,
            lifetimes=self._lifetimes,
            completed=self._completed,
        )
        self.tenants = Tenants(settings.prefill_tokens_per_s)
        self.aftermath = Aftermath(self.store, self._sink, self.tenants)
        self.leases: LeaseTable[Block] = LeaseTable()
        self.reservations = Reservations()
        self.half_writes = HalfWrites(self.store.abort_write)
        self.pins = OperatorPins(self.store)
        self.prefetching = Prefetching(self.store, self.reader, self.speeds)
        self._prefault = threading.Thread(target=self.arena.prefault, name="prefault", daemon=True)
        if folder is not None:
            restore(self.store, folder)

    @classmethod
    async def open(cls, settings: KvCacheSettings) -> Cache:
        """A cache with what its disk folder holds. Raises SettingsError for a folder or memory that is not to be had.

        A disk that fails beyond that leaves the service without a disk tier, which is logged.
        """
        policy = settings.policy()
        settings = settings.with_sizes_of(policy)
        if settings.memory_bytes > (most := host_memory_bytes()):
            raise SettingsError(
                f"memory_bytes is {settings.memory_bytes}, and this host has {most}",
                field="memory_bytes",
                value=settings.memory_bytes,
                allowed=f"at most {most}",
            )
        lock, folder, backend = None, None, None
        if settings.shared_url is not None:
            backend = open_backend(settings.shared_url.get_secret_value(), timeout_s=settings.shared_timeout_s)
        with without_collections():
            if settings.disk_path and settings.disk_bytes:
                path = Path(settings.disk_path)
                lock = lock_folder(path)
                try:
                    folder = await asyncio.to_thread(
                        open_folder,
                        path,
                        slabs=settings.disk_bytes // settings.slab_bytes,
                        slab_bytes=settings.slab_bytes,
                        direct=settings.disk_direct_io,
                        map_bytes=settings.index_map_bytes,
                        sync=settings.disk_sync,
                    )
                except (OSError, lmdb.Error) as error:
                    logger.error("no disk tier: %s", error, extra={"disk_path": settings.disk_path})
            cache = cls(settings, policy, folder, lock, backend)
        cache._prefault.start()
        if cache.shared is not None:
            cache.shared.start()
        return cache

    async def close(self) -> None:
        """Write down what is on its way to disk and give everything back."""
        self.aftermath.close()
        self.prefetching.close()
        self.half_writes.close()
        if self.shared is not None:
            await self.shared.close()
        if self._disk is not None:
            await self._disk.flush()
            await asyncio.to_thread(self._disk.close)
        self.arena.close()
        if self._lock is not None:
            os.close(self._lock)

    async def maintain(self) -> None:
        """End leases, reservations and blocks whose time is up, for ever."""
        regrow_at = time.monotonic() + _REGROW_S
        while True:
            await asyncio.sleep(_MAINTENANCE_S)
            try:
                self.store.unpin(self.leases.expire(time.monotonic()))
                for write in self.reservations.expire(time.monotonic()):
                    self.store.abort_write(write)
                self.pins.expire()
                self.store.expire()
                if self.store.disk is not None and time.monotonic() >= regrow_at:
                    self.store.disk.slots.resume_growing()
                    regrow_at = time.monotonic() + _REGROW_S
            except Exception:
                logger.exception("maintenance failed")  # leases must go on expiring whatever went wrong once

    def detach(self, attachment: Attachment) -> None:
        """A client has gone: its leases and reservations go too. Streams end by themselves."""
        self.attachments.leave(attachment)
        self.prefetching.drop_owner(attachment.id)
        self.store.unpin(self.leases.drop_owner(attachment.id))
        for write in self.reservations.drop_owner(attachment.id):
            self.store.abort_write(write)

    def names(self, asker: Asker, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """The names under which `asker`'s blocks of these hashes are kept."""
        return stored_names(self.policy.sharing, asker, hashes)

    def lookup(
        self,
        attachment: Attachment,
        hashes: Sequence[bytes],
        heads: Span,
        lease_ttl_s: float | None,
        asker: Asker = Asker(),
        session: SessionTerms | None = None,
    ) -> Found:
        """The longest prefix of a chain that is present, leased for `lease_ttl_s` unless that is None."""
        namespace, names = attachment.namespace, self.names(asker, hashes)
        found, rows, in_memory, _ = self.store.prefix(namespace, names, namespace.mask(heads))
        lease = 0
        if found and lease_ttl_s is not None:
            self.store.pin(found)
            lease = self.leases.grant(attachment.id, found, time.monotonic() + lease_ttl_s)
        asyncio.get_running_loop().call_soon(self.store.touch, found, self._lifetimes.use(session))
        if found and in_memory == len(found):
            runs: tuple[TierRun, ...] = (TierRun(Tier.MEMORY, in_memory, 0.0),)
        else:
            runs = tier_runs(self.speeds, namespace, found)
        self.aftermath.of_lookup(namespace, names, asker.tenant, runs, found)
        return Found(found, runs, lease, rows)

    def begin_write(
        self,
        namespace: Namespace,
        name: bytes,
        parent: bytes,
        heads: Span,
        tenant: bytes = b"",
        session: SessionTerms | None = None,
    ) -> Write | Refusal:
        """`Store.begin_write` for a tenant and a session; a block that is there lives on as long as the session."""
        self.half_writes.yield_to_another(namespace, name)
        begun = self.store.begin_write(namespace, name, parent, heads, tenant)
        if isinstance(begun, Refusal) and begun.refusal is PutRefusal.NO_ROOM and self.half_writes:
            self.half_writes.close()
            begun = self.store.begin_write(namespace, name, parent, heads, tenant)
        if isinstance(begun, Refusal):
            if begun.present is not None and begun.present.expires_at:
                self.store.extend(begun.present, self._lifetimes.use(session))
            self.tenants.of(tenant).refused += begun.refusal is PutRefusal.QUOTA
        return begun

    def release(self, attachment: Attachment, lease: int) -> None:
        self.store.unpin(self.leases.release(attachment.id, lease))

    def reserve(
        self,
        attachment: Attachment,
        names: Sequence[bytes],
        parents: Sequence[bytes],
        heads: Span,
        hold_s: float,
        *,
        tenant: bytes = b"",
        session: SessionTerms | None = None,
    ) -> tuple[int, list[Write | Refusal]]:
        """Take slots to write in place: the reservation (0 when there is no slot), and for each hash leave to write.

        Blocks are kept for `hold_s` once they are there: from the commit on, or from now.
        """
        begun = [
            self.begin_write(attachment.namespace, name, parent, heads, tenant, session)
            for name, parent in zip(names, parents, strict=True)
        ]
        for refusal in begun:
            if hold_s and isinstance(refusal, Refusal) and refusal.present is not None:
                self.hold(refusal.present, hold_s)
        taken = [write for write in begun if isinstance(write, Write)]
        if not taken:
            return 0, begun
        ends_at = time.monotonic() + _RESERVATION_S
        return self.reservations.add(attachment.id, taken, ends_at, hold_s, session), begun

    def hold(self, block: Block, hold_s: float) -> None:
        """Keep a block for a hand-off, whoever comes for it."""
        self.store.pin([block])
        self.leases.grant(_SERVICE_OWNER, [block], time.monotonic() + hold_s)

    def namespace(self, identity: bytes) -> Namespace:
        """The namespace of an identity. Raises NotFoundError."""
        namespace = self.store.namespaces.get(identity)
        if namespace is None:
            raise NotFoundError(
                f"no namespace of identity {identity.hex()[:16]}", field="identity", value=identity.hex()
            )
        return namespace

    async def evict(self, identity: bytes, hashes: Sequence[bytes]) -> int:
        """Drop blocks (all of the namespace when none is named), from disk beyond recovery; leased ones stay."""
        namespace = self.namespace(identity)
        names = hashes or [*namespace.blocks]
        dropped = 0
        for start in range(0, len(names), _EVICT_BLOCKS):
            dropped += self._evict(namespace, names[start : start + _EVICT_BLOCKS])
            await asyncio.sleep(0)  # others are not to wait for a whole namespace
        return dropped

    def _evict(self, namespace: Namespace, names: Sequence[bytes]) -> int:
        dropped = 0
        withdrawn: list[Entry] = []
        for name in names:
            block = namespace.blocks.get(name)
            if block is None or block.pins:
                continue
            slot = block.disk
            if block.shared is not None:
                withdrawn.append(Entry(block.hash, block.parent, block.tenant, block.expires_at, 0.0, block.shared))
            self.store.drop(block)
            if self.shared is not None:
                self.shared.give_up(block)
            if slot is not None and self._disk is not None and self.store.disk is not None:
                self._disk.erase(slot, self.store.disk.slot_bytes(block))
            dropped += 1
        if self.shared is not None:
            self.shared.withdraw(namespace, withdrawn)
        return dropped

    async def flush(self) -> int:
        """`Writer.flush`, once everything on its way to the shared store has got there or been given up.

        Raises ConflictError where there is neither a disk nor a shared store.
        """
        if self.shared is not None:
            await self.shared.flush()
        if self._disk is not None:
            return await self.writer.flush()
        if self.shared is None:
            raise ConflictError(
                "this cache has memory alone", field="disk_path", allowed="a service with a disk or a shared store"
            )
        return 0

    @property
    def quarantined(self) -> int:
        return sum(books.slots.withdrawn for books in self.store.tiers)

    def _changed(self, change: Change) -> None:
        if change.tier is Tier.DISK and not change.stored and self._disk is not None:
            self._disk.delete(change.block.namespace.identity, change.block.hash)
        self.events.publish(change)

    def _renewed(self, block: Block) -> None:
        if self._disk is not None and block.disk is not None:
            self._disk.renew(Row.of_block(block, block.disk))
        if self.shared is not None:
            self.shared.renew(block)

    def _completed(self, block: Block) -> None:
        """A block was written: it goes down at once where everything does."""
        self.writer.follow(block)
        if self.shared is not None and self.policy.shared.admission == "all":
            self.shared.offer(block)

    def _sink(self, block: Block) -> bool:
        """A block was used: what was not worth a place below at its first use may be now. True when it was copied."""
        if block.memory is None or not block.complete:
            return False
        if block.disk is None:
            self.writer.follow(block)
        return self.shared is not None and self.shared.offer(block)
