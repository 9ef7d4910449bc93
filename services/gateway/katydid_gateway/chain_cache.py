"""Block hashes of prompts whose beginnings were seen before: an agent's next turn hashes its new blocks alone.

A chain is 3,000 small SHA-256 calls for 200K tokens. One running SHA-256 over the ids, read off every `STRIDE` blocks,
costs a sixth of that and names each beginning as surely as the chain does; what was hashed behind it is looked up.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256

from katydid_runtime.block_hash import BLOCK_TOKENS, HASH_BYTES, ChainKey, split_hashes

from katydid_gateway.text.prefixes import Prefix

__all__ = ["ChainCache"]

STRIDE = 64
_STRIDE_BYTES = STRIDE * BLOCK_TOKENS * 4
# A stride's hashes, its name, and what a dict entry costs.
_ENTRY_BYTES = STRIDE * HASH_BYTES + 32 + 200
_BLOCK_BYTES = BLOCK_TOKENS * 4
# Tenants whose hashes of one beginning are kept with it.
_MOST_KEYS = 8


class ChainCache:
    """Hashes by beginning, least recently used out first, within `capacity_bytes` of memory."""

    def __init__(self, capacity_bytes: int) -> None:
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._most = capacity_bytes // _ENTRY_BYTES

    @property
    def size_bytes(self) -> int:
        return len(self._entries) * _ENTRY_BYTES

    def chain(
        self, ids: bytes, key: ChainKey, known: Prefix | None = None, prefix: Prefix | None = None
    ) -> tuple[bytes, ...]:
        """The hashes that `key.extend(ids)` gives, for packed ids that begin with those of `known` and of `prefix`.

        What is kept with `known` is not hashed again; `prefix` keeps its part for the next turn.
        """
        start = known.chains.get(key) if known is not None else None
        if start:
            rest = memoryview(ids)[len(start) * _BLOCK_BYTES :]
            chain = start + tuple(split_hashes(key.extend(rest, first_block=len(start), previous=start[-1])))
        else:
            chain = tuple(split_hashes(self._by_strides(ids, key)))
        if prefix is not None and len(prefix.chains) < _MOST_KEYS:
            prefix.chains[key] = chain[: prefix.id_bytes // _BLOCK_BYTES]
        return chain

    def _by_strides(self, ids: bytes, key: ChainKey) -> bytes:
        running = sha256(key.root + bytes([len(key.salt)]) + key.salt + key.public_blocks.to_bytes(8, "little"))
        view = memoryview(ids)
        parts: list[bytes] = []
        previous = b""
        for start in range(0, len(ids) - _STRIDE_BYTES + 1, _STRIDE_BYTES):
            stride = view[start : start + _STRIDE_BYTES]
            running.update(stride)
            name = running.digest()
            part = self._entries.get(name)
            if part is None:
                part = key.extend(stride, first_block=len(parts) * STRIDE, previous=previous)
                self._put(name, part)
            else:
                self._entries.move_to_end(name)
            parts.append(part)
            previous = part[-HASH_BYTES:]
        rest = view[len(parts) * _STRIDE_BYTES :]
        return b"".join((*parts, key.extend(rest, first_block=len(parts) * STRIDE, previous=previous)))

    def _put(self, name: bytes, part: bytes) -> None:
        if self._most:
            self._entries[name] = part
            if len(self._entries) > self._most:
                self._entries.popitem(last=False)
