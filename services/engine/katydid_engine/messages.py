"""What the face and a worker say to each other over their socket pair; frozen records, framed by ``channel``."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TypeAlias

from katydid_engine.block_pool import BlockEvents
from katydid_engine.plan import Logprobs
from katydid_engine.request import CachedTokens, FinishReason, Interval, Request, Tier

__all__ = [
    "Abort",
    "Alive",
    "ChoiceEnd",
    "ChoiceTokens",
    "ExpertBalance",
    "Failed",
    "FirstToken",
    "Flush",
    "FromWorker",
    "KvArrived",
    "KvAsk",
    "KvCancel",
    "KvCorrupt",
    "KvFound",
    "KvGiveUp",
    "KvGranted",
    "KvLookup",
    "KvReadSlotsFree",
    "KvReserve",
    "KvStore",
    "KvWriteSlotsFree",
    "Load",
    "Profile",
    "Ready",
    "Reply",
    "SetKv",
    "StepReport",
    "Stop",
    "Submit",
    "ToWorker",
]


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    handle: int


@dataclass(frozen=True, slots=True)
class Flush:
    """Empties the prefix cache; answered by a Reply with the number of blocks dropped."""

    call: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Records the next ``steps`` steps into a file at ``path``; answered by a Reply once it is written."""

    call: int
    steps: int
    path: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the worker at once."""


@dataclass(frozen=True, slots=True)
class SetKv:
    """Whether the cache service can be asked now, and whether blocks are packed into its own memory (KvReserve)."""

    attached: bool
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class KvFound:
    """Answer to KvLookup: the blocks found, as runs of a tier. They will follow in order as KvArrived. With ``more``
    others may be found behind them, which are told of in the same way."""

    ticket: int
    runs: tuple[tuple[Tier, int], ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class KvArrived:
    """The next blocks of a ticket lie in these read slots. ``last``: no more will come, whatever was found.

    ``checksums`` has the 64-bit linear checksum that each must have once it is unpacked, 0 for one that is known to be
    right; empty: all are.
    """

    ticket: int
    slots: tuple[int, ...]
    last: bool
    checksums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KvGranted:
    """Answer to the KvReserve of each hash: the slot to pack the block into, or None: there is nothing to write.

    Every slot is answered by KvStore or KvGiveUp.
    """

    hashes: tuple[bytes, ...]
    slots: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class KvWriteSlotsFree:
    """The blocks in these write slots have been stored or given up."""

    slots: tuple[int, ...]


ToWorker: TypeAlias = (
    Submit | Abort | Flush | Profile | Stop | SetKv | KvFound | KvArrived | KvGranted | KvWriteSlotsFree
)


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has its model and waits for requests; ``start_s`` are seconds of its start by phase."""

    num_pages: int
    max_model_tokens: int
    start_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Alive:
    """The loop turns with nothing to report."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker ends. ``reason`` names a class of ``katydid_runtime.errors``."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Reply:
    call: int
    value: int | str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceTokens:
    """New tokens of one choice, or log probabilities of prompt tokens (then ``tokens`` is empty)."""

    handle: int
    choice: int
    tokens: array[int]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class FirstToken:
    handle: int
    cached: CachedTokens
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """A choice ended. ``error`` names a class of ``katydid_runtime.errors`` when ``reason`` is ERROR.

    ``drafted`` tokens were proposed for it, of which ``accepted`` were its own. ``intervals`` are the request's phases
    since its FirstToken, in the last choice to end (``last``).
    """

    handle: int
    choice: int
    reason: FinishReason
    last: bool
    output_tokens: int
    cached: CachedTokens
    preemptions: int
    drafted: int = 0
    accepted: int = 0
    stop_token: int | None = None
    error: str = ""
    message: str = ""
    intervals: tuple[Interval, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Present load of a rank; the fields are those of RankLoad in engine.proto."""

    running: int = 0
    waiting: int = 0
    waiting_uncached_tokens: int = 0
    free_pages: int = 0
    total_pages: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class KvLookup:
    """Asks for blocks of a chain, from the first one beyond the engine's own pages. ``span_id`` is that of the
    request's lookup phase; empty when it decodes already, and waits for no phase. ``before`` has the hashes of the
    blocks of the first one's run that come before it, ``tenant`` is who asks. Blocks that are not there are looked for
    again for ``coming_s``: another engine computes them."""

    ticket: int
    handle: int
    hashes: bytes
    span_id: bytes = b""
    before: bytes = b""
    tenant: bytes = b""
    coming_s: float = 0.0


@dataclass(frozen=True, slots=True)
class KvCancel:
    """Nobody waits for this ticket's blocks any more."""

    ticket: int


@dataclass(frozen=True, slots=True)
class KvReadSlotsFree:
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvStore:
    """A finished block lies in a write slot or a granted one, to be stored; ``run`` is the hash of its run's first.

    ``checksum`` is the 64-bit linear one that was made when it was packed into a granted slot.
    """

    slot: int
    hash: bytes
    parent: bytes
    tenant: bytes
    hold_s: float | None
    run: bytes = b""
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class KvReserve:
    """A finished block waits for a slot of the cache service's memory."""

    hash: bytes
    parent: bytes
    tenant: bytes
    hold_s: float | None


@dataclass(frozen=True, slots=True)
class KvGiveUp:
    """Granted slots that nothing was packed into, because their blocks' pages had gone."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvCorrupt:
    """A block of ``tenant`` that did not have its checksum when it was unpacked."""

    hash: bytes
    tenant: bytes


KvAsk: TypeAlias = KvLookup | KvCancel | KvReadSlotsFree | KvStore | KvReserve | KvGiveUp | KvCorrupt


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step produced, for the face to spread over its sessions."""

    load: Load
    tokens: tuple[ChoiceTokens, ...] = ()
    first_tokens: tuple[FirstToken, ...] = ()
    ends: tuple[ChoiceEnd, ...] = ()
    blocks: BlockEvents = field(default_factory=BlockEvents)
    kv: tuple[KvAsk, ...] = ()
    computed_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertBalance:
    """How redundant experts lie.

    Attributes:
        imbalance: load of the busiest rank over the mean, averaged over layers.
        layers_moved, layers: of the rebalancing under way; equal when none is.
        finished, abandoned: rebalancings since the start.
        placed_at: unix time of the last that finished; None before.
    """

    imbalance: float
    layers_moved: int
    layers: int
    finished: int
    abandoned: int
    placed_at: float | None


FromWorker: TypeAlias = Ready | Alive | Failed | Reply | StepReport | ExpertBalance
