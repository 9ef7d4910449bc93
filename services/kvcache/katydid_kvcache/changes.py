"""What happens to blocks: they enter and leave tiers, writes begin, and some are refused."""

from __future__ import annotations

from dataclasses import dataclass

from katydid_cache.layout import Span
from katydid_cache.records import PutRefusal, Tier

from katydid_kvcache.blocks import Block

__all__ = ["Change", "Refusal", "Write"]


@dataclass(frozen=True, slots=True)
class Change:
    """A complete block entered (`stored`) or left `tier`."""

    block: Block
    tier: Tier
    stored: bool


@dataclass(frozen=True, slots=True)
class Write:
    """Leave to write `heads` of `block` into its memory slot."""

    block: Block
    heads: Span
    mask: int

    @property
    def whole(self) -> bool:
        """Whether it is all heads that are written."""
        return self.mask == self.block.namespace.all_heads


@dataclass(frozen=True, slots=True)
class Refusal:
    """A write that is not to be: `present` when the heads are there already, else BUSY, NO_ROOM or QUOTA."""

    present: Block | None = None
    refusal: PutRefusal | None = None
