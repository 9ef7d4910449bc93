"""One cache made of many instances: the face of `CacheClient`, each run of a chain where rendezvous hashing puts it.

    cache = CacheFleet(Instances("dns:kvcache.svc:7301"), name="engine-0")
    await cache.attach(identity, layout)
    found = await cache.lookup(hashes)                     # asks the homes of all runs at once

There is no master: clients agree by hashing, and instances join and leave as the source of their addresses says. It
always degrades: an instance that is dead or slow costs a bounded time, and its runs are looked for and written at their
next in rank until it is back. Runs that are hit often get a second home.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Unpack

from katydid_runtime.block_hash import HASH_BYTES, RUN_BLOCKS, split_hashes
from katydid_runtime.errors import ConflictError
from katydid_runtime.tls import Tls
from katydid_runtime.trace_context import TraceContext

from katydid_cache.chain_search import SLACK_BYTES, ChainSearch, Searched
from katydid_cache.client import CacheClient
from katydid_cache.get_call import byte_buffers
from katydid_cache.hot_runs import HotRuns
from katydid_cache.instances import Instances
from katydid_cache.layout import BlockLayout
from katydid_cache.members import Member, Members
from katydid_cache.placement import pick, rank, run_starts
from katydid_cache.records import (
    BlockMissReason,
    GetResult,
    LookupResult,
    PrefetchResult,
    PutBlock,
    PutOptions,
    PutOutcome,
    PutRefusal,
    PutStatus,
)
from katydid_cache.spreading import Spreading

__all__ = ["CacheFleet"]

# The slowest link that is worth waiting for, and what a call takes beside.
_LEAST_BYTES_PER_S = 50e6
_CALL_S = 0.5
_REFUSED = PutOutcome(PutStatus.REFUSED, PutRefusal.STORE_UNAVAILABLE)


@dataclass(slots=True)
class _Lease:
    """Leases at the instances that have something of a prefix, and whose each block is."""

    parts: list[tuple[Member, int]] = field(default_factory=list)
    owners: dict[bytes, Member] = field(default_factory=dict)


class CacheFleet:
    """A cache over `instances`; belongs to one event loop. Options as of `CacheClient`."""

    arena = None
    in_place = None
    """Instances are read over the network."""

    def __init__(
        self,
        instances: Instances,
        *,
        name: str = "",
        tls: Tls | None = None,
        token: str | None = None,
        lanes: int = 1,
        run_blocks: int = RUN_BLOCKS,
        hot: HotRuns | None = None,
    ) -> None:
        def client(address: str) -> CacheClient:
            return CacheClient(address, name=name, degrade=True, tls=tls, token=token, lanes=lanes)

        self._members = Members(instances, client)
        self._hot = HotRuns() if hot is None else hot
        self._search = ChainSearch(self._members, self._hot, self._give_back)
        self._spreading = Spreading()
        self._run_blocks = run_blocks
        self._block_bytes = 0
        self._leases: dict[int, _Lease] = {}
        self._ids = itertools.count(1)
        self._releasing: set[asyncio.Task[None]] = set()

    @property
    def attached(self) -> bool:
        """Whether any instance can be asked."""
        return bool(self._members.usable)

    @property
    def peer_address(self) -> str:
        """Empty: no instance is nearer than the others."""
        return ""

    @property
    def members(self) -> Members:
        return self._members

    @property
    def run_blocks(self) -> int:
        """Blocks of a run."""
        return self._run_blocks

    def owners(self, lease: int) -> dict[bytes, Member]:
        """Whose each block found under a lease is."""
        return dict(self._leases[lease].owners) if lease in self._leases else {}

    async def attach(
        self, identity: bytes, layout: BlockLayout, *, arena: bool = False, timeout_s: float = 5.0
    ) -> bool:
        """Join the namespace at all instances, now and later; whether any answered. `arena` is not to be had.

        Raises IdentityMismatchError when one knows the identity with another layout.
        """
        del arena
        if self._block_bytes:
            raise ConflictError("this client is attached already; one client is one namespace")
        self._block_bytes = layout.block_bytes
        return await self._members.attach(identity, layout, timeout_s)

    async def lookup(
        self,
        hashes: bytes,
        *,
        before: bytes = b"",
        lease: bool = True,
        timeout_s: float = 1.0,
        trace: TraceContext | None = None,
    ) -> LookupResult:
        """The longest prefix of the chain `hashes` (packed) that the instances have together.

        `before` has the hashes (packed) of the blocks of the first one's run that come before it.
        """
        started = time.monotonic()
        names = split_hashes(hashes)
        runs = run_starts(len(before) // HASH_BYTES, len(names), self._run_blocks)
        if not runs:
            return LookupResult()
        heads = {run: names[run.start] for run in runs}
        if before:
            heads[runs[0]] = before[:HASH_BYTES]
        searched = await self._search.run(names, runs, heads, lease=lease, timeout_s=timeout_s, trace=trace)
        prefix = searched.prefix
        self._learn(searched, heads, names, before[-HASH_BYTES:])
        number = 0
        if searched.leases:
            number = next(self._ids)
            held = self._leases[number] = _Lease()
            for name, leases in searched.leases.items():
                if (member := self._members.get(name)) is not None:
                    held.parts += ((member, part) for part in leases)
                    owned = (place for place, owner in enumerate(prefix.owners) if owner == name)
                    held.owners |= {names[place]: member for place in owned}
        elapsed_s = time.monotonic() - started
        return LookupResult(prefix.blocks, prefix.runs, number, elapsed_s, reachable=searched.answered)

    async def get(
        self,
        lease: int,
        hashes: bytes,
        *,
        into: Sequence[memoryview],
        timeout_s: float = 30.0,
        trace: TraceContext | None = None,
    ) -> GetResult:
        """Read whole blocks found under `lease` into the caller's buffers; others are misses. See `CacheClient.get`."""
        size = self._block_bytes
        buffers = byte_buffers(into, len(hashes), size)
        names = split_hashes(hashes)
        owners = self._leases[lease].owners if lease in self._leases else {}
        parts: dict[Member, list[int]] = {}
        for place, name in enumerate(names):
            if (member := owners.get(name)) is not None:
                parts.setdefault(member, []).append(place)

        async def read(member: Member, places: Sequence[int]) -> GetResult:
            total = size * len(places)
            with member.carrying(total):
                return await member.client.get(
                    0,
                    b"".join(names[place] for place in places),
                    into=[buffers[place] for place in places],
                    timeout_s=min(timeout_s, _CALL_S + total / _LEAST_BYTES_PER_S),
                    trace=trace,
                )

        results = await asyncio.gather(*(read(member, places) for member, places in parts.items()))
        found = [False] * len(names)
        misses = dict.fromkeys(range(len(names)), BlockMissReason.ABSENT)
        for places, result in zip(parts.values(), results, strict=True):
            for index, place in enumerate(places):
                found[place] = result.found[index]
                misses[place] = result.misses.get(index, BlockMissReason.ABSENT)
        times = tuple(time for result in results for time in result.times)
        return GetResult(tuple(found), {place: misses[place] for place, good in enumerate(found) if not good}, times)

    async def put(
        self,
        blocks: Sequence[PutBlock],
        *,
        timeout_s: float = 30.0,
        **options: Unpack[PutOptions],
    ) -> list[PutOutcome]:
        """Write whole blocks, each at the home of its run (`PutBlock.run`; without one a block is its own run)."""
        size = self._block_bytes
        outcomes = [_REFUSED] * len(blocks)
        usable = self._members.usable
        if not usable:
            return outcomes
        parts: dict[Member, list[int]] = {}
        load = self._members.loads()
        for place, block in enumerate(blocks):
            run = block.run or block.hash
            ranked = rank(run, usable)
            home = pick(ranked[:2], load, more=float(size), slack=SLACK_BYTES)
            if home != ranked[0]:
                self._hot.put_at(run, home)
            load[home] += size
            parts.setdefault(self._members[home], []).append(place)

        async def write(member: Member, places: Sequence[int]) -> list[PutOutcome]:
            total = size * len(places)
            with member.carrying(total):
                return await member.client.put(
                    [blocks[place] for place in places],
                    timeout_s=min(timeout_s, 4 * _CALL_S + total / _LEAST_BYTES_PER_S),
                    **options,
                )

        written = await asyncio.gather(*(write(member, places) for member, places in parts.items()))
        for places, results in zip(parts.values(), written, strict=True):
            for place, outcome in zip(places, results, strict=True):
                outcomes[place] = outcome
        return outcomes

    async def report(self, hashes: bytes, *, timeout_s: float = 1.0) -> int:
        """Nothing: blocks are read over the network, where their checksums are checked on both sides."""
        del hashes, timeout_s
        return 0

    async def release(self, lease: int, *, timeout_s: float = 1.0) -> None:
        """Give a lease back. An unknown one is no error."""
        held = self._leases.pop(lease, _Lease())
        await asyncio.gather(*(member.client.release(part, timeout_s=timeout_s) for member, part in held.parts))

    async def prefetch(
        self, hashes: bytes, *, deadline_s: float = 1.0, wait: bool = False, timeout_s: float = 1.0
    ) -> PrefetchResult:
        """Ask the instances that have blocks under a lease of this client to move them up into memory."""
        parts: dict[Member, list[bytes]] = {}
        for name in split_hashes(hashes):
            owner = next((held.owners[name] for held in self._leases.values() if name in held.owners), None)
            if owner is not None:
                parts.setdefault(owner, []).append(name)
        results = await asyncio.gather(
            *(
                member.client.prefetch(b"".join(some), deadline_s=deadline_s, wait=wait, timeout_s=timeout_s)
                for member, some in parts.items()
            )
        )
        eta_s = max((result.eta_s for result in results), default=0.0)
        return PrefetchResult(sum(result.blocks for result in results), eta_s)

    async def close(self) -> None:
        """Leave all instances."""
        await self._spreading.close()
        for task in self._releasing:
            task.cancel()
        await asyncio.gather(*self._releasing, return_exceptions=True)
        await self._members.close()

    async def __aenter__(self) -> CacheFleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _give_back(self, name: str, lease: int) -> None:
        """Release a lease that turned out not to be needed, beside everything else."""
        if (member := self._members.get(name)) is not None:
            task = asyncio.create_task(member.client.release(lease))
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)

    def _learn(self, searched: Searched, heads: Mapping[range, bytes], names: Sequence[bytes], parent: bytes) -> None:
        """Copy what was found whole: a hot run to its second home, one that was not at home to its home."""
        now = time.monotonic()
        for run, ranked in searched.ranked.items():
            if searched.prefix.blocks < run.stop:
                return
            if any(self._members.get(name) is None for name in ranked):
                return
            owner, head = searched.prefix.owners[run.start], heads[run]
            hot, also = self._hot.hit(head, now), self._hot.also_at(head)
            if owner != ranked[0] and self._hot.stray(head, owner):
                target = ranked[0]
            elif owner == ranked[0] and hot and len(ranked) > 1 and ranked[1] not in also:
                target = ranked[1]
            else:
                continue
            before = names[run.start - 1] if run.start else parent or bytes(HASH_BYTES)
            self._spreading.copy(
                head,
                b"".join(names[run.start : run.stop]),
                b"".join((before, *names[run.start : run.stop - 1])),
                source=owner,
                target=target,
                client=self._members[target].client,
                done=partial(self._hot.copied, head, target),
            )
