"""The cache of an engine that has an instance on its own host, and others elsewhere.

The engine reads and writes the near instance alone, in its shared memory. What that one does not have is looked for at
the others; it is shown as of the shared tier, and the near instance pulls it when the engine comes to it. What the
engine writes is offered to the home of its run, which pulls it in its turn. So every byte between hosts goes from
instance to instance, beside the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from typing import Unpack

from katydid_runtime.block_hash import HASH_BYTES, split_hashes
from katydid_runtime.trace_context import TraceContext

from katydid_cache.arena import ArenaMapping
from katydid_cache.client import CacheClient
from katydid_cache.fleet import CacheFleet
from katydid_cache.layout import BlockLayout
from katydid_cache.members import Member
from katydid_cache.placement import rank
from katydid_cache.records import (
    GetResult,
    LookupResult,
    PrefetchResult,
    PutBlock,
    PutOptions,
    PutOutcome,
    PutStatus,
    Tier,
    TierRun,
)

__all__ = ["NearCache"]

_OFFERS = 256
_OFFER_S = 10.0
_SMOOTHING = 0.3

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lease:
    """Leases at the near instance, the one at the others, and where those have what."""

    near: list[int] = field(default_factory=list)
    far: int = 0
    owners: dict[bytes, Member] = field(default_factory=dict)
    parents: dict[bytes, bytes] = field(default_factory=dict)


class NearCache:
    """`near` is this host's instance, `others` all of them, itself included. Both degrade, and so does this."""

    in_place = None
    """What is written is offered to the others as well, so it goes through `put`."""

    def __init__(self, near: CacheClient, others: CacheFleet) -> None:
        self._near = near
        self._others = others
        self._leases: dict[int, _Lease] = {}
        self._ids = itertools.count(1)
        self._offers: asyncio.Queue[tuple[Context, bytes, bytes, Sequence[PutBlock]]] = asyncio.Queue(_OFFERS)
        self._offering: asyncio.Task[None] | None = None
        self._block_s = 0.0

    @property
    def attached(self) -> bool:
        """Whether the near instance can be asked: without it there is no memory to read into."""
        return self._near.attached

    @property
    def peer_address(self) -> str:
        """Where others reach the near instance; empty: nowhere."""
        return self._near.peer_address

    @property
    def arena(self) -> ArenaMapping | None:
        return self._near.arena

    async def attach(
        self, identity: bytes, layout: BlockLayout, *, arena: bool = False, timeout_s: float = 5.0
    ) -> bool:
        """Join the namespace everywhere; whether the near instance answered. Raises IdentityMismatchError."""
        answered, _ = await asyncio.gather(
            self._near.attach(identity, layout, arena=arena, timeout_s=timeout_s),
            self._others.attach(identity, layout, timeout_s=timeout_s),
        )
        self._offering = asyncio.create_task(self._offer())
        return answered

    async def lookup(
        self,
        hashes: bytes,
        *,
        before: bytes = b"",
        lease: bool = True,
        timeout_s: float = 1.0,
        trace: TraceContext | None = None,
    ) -> LookupResult:
        """What the near instance has of the chain, and behind that what the others have; see `CacheFleet.lookup`."""
        near = await self._near.lookup(hashes, lease=lease, timeout_s=timeout_s, trace=trace)
        cut = HASH_BYTES * near.blocks
        if cut == len(hashes) or not self._others.attached or not near.reachable:
            return self._with_lease(near, _Lease(near=[near.lease] if near.lease else []))
        run = (len(before) + cut) % (HASH_BYTES * self._others.run_blocks)
        known = (before + hashes[:cut])[len(before) + cut - run :]
        try:
            far = await self._others.lookup(hashes[cut:], before=known, timeout_s=timeout_s, trace=trace)
        except asyncio.CancelledError:
            await asyncio.shield(self._near.release(near.lease))
            raise
        if not far.blocks:
            return self._with_lease(near, _Lease(near=[near.lease] if near.lease else []))
        names = split_hashes(hashes)
        held = _Lease([near.lease] if near.lease else [], far.lease, self._others.owners(far.lease))
        held.parents = dict(zip(names[1:], names, strict=False))
        if near.blocks == 0:
            held.parents[names[0]] = before[-HASH_BYTES:] or bytes(HASH_BYTES)
        runs = (*near.runs, TierRun(Tier.SHARED, far.blocks, self._block_s * far.blocks))
        both = replace(near, blocks=near.blocks + far.blocks, runs=runs, duration_s=near.duration_s + far.duration_s)
        return self._with_lease(both, held)

    async def get(
        self,
        lease: int,
        hashes: bytes,
        *,
        into: Sequence[memoryview],
        timeout_s: float = 30.0,
        trace: TraceContext | None = None,
    ) -> GetResult:
        """Read blocks through the near instance, which pulls first what others have under `lease`."""
        started = time.monotonic()
        held = self._leases.get(lease, _Lease())
        await self._pull(held, hashes, timeout_s)
        left_s = max(0.0, timeout_s - (time.monotonic() - started))
        near = held.near[0] if held.near else 0
        return await self._near.get(near, hashes, into=into, timeout_s=left_s, trace=trace)

    async def put(
        self,
        blocks: Sequence[PutBlock],
        *,
        timeout_s: float = 30.0,
        **options: Unpack[PutOptions],
    ) -> list[PutOutcome]:
        """Write blocks to the near instance, and offer those stored to the homes of their runs."""
        outcomes = await self._near.put(blocks, timeout_s=timeout_s, **options)
        runs: dict[bytes, list[PutBlock]] = {}
        for block, outcome in zip(blocks, outcomes, strict=True):
            if outcome.status is PutStatus.STORED:
                # Without its bytes, which are the caller's again.
                runs.setdefault(block.run or block.hash, []).append(block._replace(payload=b""))
        for run, stored in runs.items():
            if not self._offers.full():
                self._offers.put_nowait((copy_context(), options.get("tenant", b""), run, stored))
        return outcomes

    async def prefetch(
        self, hashes: bytes, *, deadline_s: float = 1.0, wait: bool = False, timeout_s: float = 1.0
    ) -> PrefetchResult:
        """Have blocks in the near instance's memory: pulled if a lease of this client says that others have them."""
        first = hashes[:HASH_BYTES]
        number = next((number for number, held in self._leases.items() if first in held.owners), 0)
        if not number or not wait:
            return await self._near.prefetch(hashes, deadline_s=deadline_s, wait=wait, timeout_s=timeout_s)
        held = self._leases[number]
        await self._pull(held, hashes, deadline_s)
        # What was pulled is nobody's yet: this lease keeps it, under the one the caller has.
        found = await self._near.lookup(hashes, timeout_s=timeout_s)
        if found.lease and number in self._leases:
            held.near.append(found.lease)
        elif found.lease:
            await self._near.release(found.lease)
        whole = found.blocks == sum(run.blocks for run in found.runs if run.tier is Tier.MEMORY)
        return PrefetchResult(found.blocks, 0.0, found.slots) if whole else PrefetchResult(0, 0.0)

    async def report(self, hashes: bytes, *, timeout_s: float = 1.0) -> int:
        """`CacheClient.report`: what is read in place is the near instance's."""
        return await self._near.report(hashes, timeout_s=timeout_s)

    async def release(self, lease: int, *, timeout_s: float = 1.0) -> None:
        """Give a lease back. An unknown one is no error."""
        held = self._leases.pop(lease, _Lease())
        await asyncio.gather(
            self._others.release(held.far, timeout_s=timeout_s),
            *(self._near.release(part, timeout_s=timeout_s) for part in held.near),
        )

    async def close(self) -> None:
        if self._offering is not None:
            self._offering.cancel()
            await asyncio.gather(self._offering, return_exceptions=True)
        await self._others.close()
        await self._near.close()

    async def __aenter__(self) -> NearCache:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _with_lease(self, found: LookupResult, held: _Lease) -> LookupResult:
        if not held.near and not held.far:
            return found
        number = next(self._ids)
        self._leases[number] = held
        return replace(found, lease=number)

    async def _pull(self, held: _Lease, hashes: bytes, deadline_s: float) -> None:
        """Have the near instance pull what others have of `hashes`, from all of them at once."""
        parts: dict[str, list[bytes]] = {}
        for name in split_hashes(hashes):
            if (owner := held.owners.pop(name, None)) is not None:
                parts.setdefault(owner.name, []).append(name)
        if not parts:
            return
        started = time.monotonic()
        results = await asyncio.gather(
            *(
                self._near.pulls.pull(
                    source,
                    b"".join(names),
                    parents=b"".join(held.parents[name] for name in names),
                    deadline_s=deadline_s,
                )
                for source, names in parts.items()
            )
        )
        if pulled := sum(result.pulled for result in results):
            block_s = (time.monotonic() - started) / pulled
            self._block_s += (_SMOOTHING if self._block_s else 1.0) * (block_s - self._block_s)

    async def _offer(self) -> None:
        """Have the homes of runs pull what was written here, one after another, until cancelled."""
        while True:
            context, tenant, run, blocks = await self._offers.get()
            # For whom the blocks were put is for whom they are pulled.
            await asyncio.create_task(self._offer_run(tenant, run, blocks), context=context)

    async def _offer_run(self, tenant: bytes, run: bytes, blocks: Sequence[PutBlock]) -> None:
        own, usable = self._near.peer_address, self._others.members.usable
        home = rank(run, usable)[0] if usable else own
        if not own or home == own or (member := self._others.members.get(home)) is None:
            return
        result = await member.client.pulls.pull(
            own,
            b"".join(block.hash for block in blocks),
            parents=b"".join(block.parent or bytes(HASH_BYTES) for block in blocks),
            tenant=tenant,
            deadline_s=_OFFER_S,
        )
        if result.missed:
            logger.info("offered blocks were not taken", extra={"home": home, "missed": result.missed})
