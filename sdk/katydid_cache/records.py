"""What the client's calls take and give: plain records, no protobuf."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypedDict

from katydid_runtime.trace_context import TraceContext

from katydid_cache.arena_slots import ArenaSlots

__all__ = [
    "BlockChange",
    "BlockMissReason",
    "Buffer",
    "CacheStats",
    "Durability",
    "GetResult",
    "HitRate",
    "LookupResult",
    "PrefetchResult",
    "PutBlock",
    "PutOptions",
    "PutOutcome",
    "PutRefusal",
    "PutStatus",
    "ReadSpeed",
    "Snapshot",
    "TenantStats",
    "TenantTierStats",
    "Tier",
    "TierRun",
    "TierStats",
    "TierTime",
    "WatchEvent",
]

Buffer: TypeAlias = "bytes | bytearray | memoryview"


class Tier(enum.IntEnum):
    """Where a block is. Values are those of the protocol."""

    MEMORY = 1
    DISK = 2
    SHARED = 3


class Durability(enum.IntEnum):
    """When a write counts as done: in the service's memory, or on its disk, where it survives kill -9."""

    MEMORY = 1
    DISK = 2


class PutStatus(enum.IntEnum):
    """What became of a written block: stored now, there already, or refused (`PutOutcome.refusal` says why)."""

    STORED = 1
    PRESENT = 2
    REFUSED = 3


class PutRefusal(enum.IntEnum):
    """Why a block was not stored; the protocol explains each. UNSPECIFIED: a reason that this version does not know."""

    UNSPECIFIED = 0
    CHECKSUM = 1
    INCOMPLETE = 2
    BUSY = 3
    NO_ROOM = 4
    CORRUPT = 5
    NO_DISK = 6
    DISK_FULL = 7
    DISK_FAILING = 8
    STORE_UNAVAILABLE = 9
    QUOTA = 10

    @classmethod
    def _missing_(cls, _value: object) -> PutRefusal:
        return cls.UNSPECIFIED


class BlockMissReason(enum.IntEnum):
    """Why a block was not read; the protocol explains each. UNSPECIFIED: a reason that this version does not know."""

    UNSPECIFIED = 0
    ABSENT = 1
    CORRUPT = 2
    STORE_UNAVAILABLE = 3

    @classmethod
    def _missing_(cls, _value: object) -> BlockMissReason:
        return cls.UNSPECIFIED


class TierRun(NamedTuple):
    """`blocks` consecutive blocks in `tier`; `eta_s` is the expected time to have them in the service's memory."""

    tier: Tier
    blocks: int
    eta_s: float


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The longest prefix found: `blocks` in number, by tier in `runs`, kept by `lease` (0: none) until released.

    `duration_s` is the time spent in the service. `reachable` is False when the service did not answer and the
    client degrades to misses. With an arena and a lease, `slots` has the blocks of the memory runs, in order.
    """

    blocks: int = 0
    runs: tuple[TierRun, ...] = ()
    lease: int = 0
    duration_s: float = 0.0
    reachable: bool = True
    slots: ArenaSlots = field(default_factory=ArenaSlots)


class TierTime(NamedTuple):
    """`blocks` read from `tier` took `duration_s` in the service."""

    tier: Tier
    blocks: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class GetResult:
    """Outcome of a read. A block's buffer is valid if and only if its `found` is True: arrived whole, checksum right.

    `misses` gives the reason of each block not found, by index.
    """

    found: tuple[bool, ...]
    misses: Mapping[int, BlockMissReason] = field(default_factory=dict)
    times: tuple[TierTime, ...] = ()

    @property
    def prefix(self) -> int:
        """Blocks found before the first miss: what a sequence can use."""
        return next((index for index, found in enumerate(self.found) if not found), len(self.found))


class PutBlock(NamedTuple):
    """A block to write: 32-byte `hash`, the `parent` hash (empty for a first block), and its payload.

    The payload is the whole object, or the runs of the heads written, in layout order; it must not change until the
    call returns. `run` is the hash of the first block of its run (see `placement`), for a fleet of instances.
    """

    hash: bytes
    parent: bytes
    payload: Buffer
    run: bytes = b""


class PutOptions(TypedDict, total=False):
    """How whole blocks are written wherever they belong; the names and meanings are those of `CacheClient.put`."""

    durability: Durability
    tenant: bytes
    ttl_s: float | None
    hold_s: float | None
    trace: TraceContext | None


class PutOutcome(NamedTuple):
    """`refusal` is set if and only if `status` is REFUSED."""

    status: PutStatus
    refusal: PutRefusal | None = None


class PrefetchResult(NamedTuple):
    """`blocks` that are or will be in memory, after `eta_s`.

    After waiting, with an arena, `slots` has the blocks that are there, from the first on without a gap.
    """

    blocks: int
    eta_s: float
    slots: ArenaSlots = ArenaSlots()


class HitRate(NamedTuple):
    """Share of the blocks looked up that a tier of `capacity_bytes` would find, admitting all or what comes back."""

    capacity_bytes: int
    admit_all: float
    second_touch: float


class TenantTierStats(NamedTuple):
    """What a tenant has of one tier, and found there; see the protocol for each field."""

    bytes: int
    hit_tokens: int
    hit_bytes: int
    guaranteed_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Figures of one tenant since the service's start; see the protocol for each field."""

    tiers: Mapping[Tier, TenantTierStats]
    missed_tokens: int
    saved_prefill_s: float
    refused: int
    shared_hits: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """Figures of one tier since the service's start; see the protocol for each field."""

    blocks: int
    bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    writes: int
    evictions: int
    corrupt: int
    shed: int
    sheds: Mapping[str, int] = field(default_factory=dict)
    eviction: str = ""
    admission: str = ""
    hit_rates: tuple[HitRate, ...] = ()


class ReadSpeed(NamedTuple):
    """Reads of at most `up_to_bytes` come out of `tier` at `bytes_per_s`, measured."""

    tier: Tier
    up_to_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class CacheStats:
    tiers: Mapping[Tier, TierStats]
    leases: int
    reservations: int
    attachments: int
    quarantined: int
    boot_epoch: int
    speeds: tuple[ReadSpeed, ...] = ()
    pulled: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    tenants: Mapping[bytes, TenantStats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Part of the blocks held: packed hashes in one tier. `last` ends the snapshot.

    Changes follow with all that happened since its first part, and may tell again what it told.
    """

    boot_epoch: int
    sequence: int
    tier: Tier
    hashes: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class BlockChange:
    """Packed hashes that entered (`stored`) and left (`removed`) one tier."""

    boot_epoch: int
    sequence: int
    tier: Tier
    stored: bytes
    removed: bytes


WatchEvent: TypeAlias = "Snapshot | BlockChange"
