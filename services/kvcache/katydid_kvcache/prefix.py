"""The longest prefix of a chain that a namespace holds: found in bulk, because chains have thousands of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from katydid_kvcache.blocks import ROW, Block, Namespace

__all__ = ["Prefix", "longest_prefix"]


class Prefix(NamedTuple):
    """Blocks found, in order; the ROWs of those whole and in memory, back to back; how many are in which tier.

    `in_shared` are in the shared store alone, what is left of them on disk.
    """

    blocks: list[Block]
    rows: bytes
    in_memory: int
    in_shared: int


def longest_prefix(
    namespace: Namespace, hashes: Sequence[bytes], mask: int, now: float, *, some_ended: bool, shared_reachable: bool
) -> Prefix:
    """The prefix whose blocks have the heads in `mask` and are alive at `now`, in Unix seconds.

    `some_ended` says that there may be blocks whose time is up.
    """
    known = [*map(namespace.blocks.get, hashes)]
    if None in known:
        del known[known.index(None) :]
    there = cast("list[Block]", known)
    rows = b"".join([block.row for block in there])
    if len(rows) == ROW.size * len(there) and not some_ended:
        # Nearly always: all of it whole, in memory and alive. Otherwise there is more to ask of each block.
        return Prefix(there, rows, len(there), 0)
    return _one_by_one(there, mask, now, shared_reachable)


def _one_by_one(there: list[Block], mask: int, now: float, shared_reachable: bool) -> Prefix:
    in_memory = in_shared = end = 0
    for block in there:
        if block.heads & mask != mask or 0 < block.expires_at <= now:
            break
        if block.memory is not None:
            in_memory += 1
        elif block.disk is None:
            if not shared_reachable:
                break
            in_shared += 1
        end += 1
    found = there[:end]
    return Prefix(found, b"".join([block.row for block in found]), in_memory, in_shared)
