"""The tiers of one cache as its settings want them: memory always, disk and shared store where there are any."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from katydid_kvcache.arena import Arena
from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.disk.recovery import GENERATION_BITS, DiskFolder
from katydid_kvcache.disk.slot_header import HEADER_BYTES
from katydid_kvcache.disk.tier import DiskTier
from katydid_kvcache.memory import MemoryTier
from katydid_kvcache.policy.policy_file import CachePolicy
from katydid_kvcache.read_speeds import ReadSpeeds
from katydid_kvcache.settings import KvCacheSettings
from katydid_kvcache.shared.backend import Backend
from katydid_kvcache.shared.tier import SharedTier
from katydid_kvcache.slabs import SlabAllocator
from katydid_kvcache.store import Change, Store

__all__ = ["Tiers", "make_tiers"]


@dataclass(frozen=True, slots=True)
class Tiers:
    """The index over all tiers, and what moves the bytes of each."""

    store: Store
    arena: Arena
    memory: MemoryTier
    disk: DiskTier | None
    shared: SharedTier | None


def make_tiers(
    settings: KvCacheSettings,
    policy: CachePolicy,
    folder: DiskFolder | None,
    backend: Backend | None,
    speeds: ReadSpeeds,
    *,
    namespaces: Callable[[], list[Namespace]],
    changed: Callable[[Change], None],
    renewed: Callable[[Block], None],
) -> Tiers:
    """Empty tiers: a disk tier over `folder`, a shared one over `backend`. `namespaces` gives those clients use.

    `changed` and `renewed` are as in `Store`. To be called in the loop that will run them.
    """
    slab_bytes = settings.slab_bytes
    slots: SlabAllocator[Block] = SlabAllocator(settings.memory_bytes // slab_bytes, slab_bytes)
    arena = Arena(settings.memory_bytes // slab_bytes, slab_bytes)
    memory = MemoryTier(arena, slots)
    disk_slots: SlabAllocator[Block] | None = None
    disk: DiskTier | None = None
    if folder is not None:
        first = folder.boot << GENERATION_BITS
        disk_slots = SlabAllocator(settings.disk_bytes // slab_bytes, slab_bytes, first_generation=first)
        disk = DiskTier(
            folder.segments,
            folder.catalog,
            known=folder.namespaces,
            threads=settings.disk_threads,
            sync=settings.disk_sync,
            loop=asyncio.get_running_loop(),
            speeds=speeds,
        )
    store = Store(
        slots,
        disk_slots,
        disk_header_bytes=HEADER_BYTES,
        shared_blocks=settings.shared_index_blocks if backend is not None else 0,
        memory_policy=policy.memory,
        disk_policy=policy.disk,
        changed=changed,
        renewed=renewed,
        now=time.time,
    )
    shared: SharedTier | None = None
    if backend is not None:
        shared = SharedTier(
            backend,
            store,
            memory,
            speeds,
            policy.shared,
            namespaces,
            pack_bytes=settings.shared_pack_bytes,
            queue_bytes=settings.shared_queue_bytes,
            timeout_s=settings.shared_timeout_s,
            refresh_s=settings.shared_refresh_s,
        )
    return Tiers(store, arena, memory, disk, shared)
