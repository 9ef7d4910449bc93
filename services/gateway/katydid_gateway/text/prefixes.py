"""Prompts seen lately, up to their last special token: the next turn of a conversation begins with one of them.

Comparing 800 KB takes 0.05 ms; cutting, looking up and joining its segments 1 ms, hashing its blocks again 0.7 ms.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from katydid_runtime.block_hash import ChainKey

__all__ = ["Prefix", "RecentPrefixes"]

# Shorter prompts are cut and looked up as fast as they are found here.
_SHORTEST = 8192
_MOST = 64
_END = 64


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The beginning of a prompt that ends with a special token, its packed ids, and its block hashes by key.

    It is the first `length` characters of `prompt`; `ids` are the first `id_bytes` of the prompt's. Neither is copied.
    """

    prompt: str
    length: int
    prompt_ids: bytes
    id_bytes: int
    chains: dict[ChainKey, tuple[bytes, ...]] = field(default_factory=dict)
    _end: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_end", self.prompt[max(0, self.length - _END) : self.length])

    def begins(self, text: str) -> bool:
        """Whether `text` begins with it."""
        # A next turn mostly begins with the whole prompt; of others the end alone tells nearly all apart.
        if text.startswith(self.prompt):
            return True
        return text.startswith(self._end, self.length - len(self._end)) and text.startswith(self.prompt[: self.length])

    @property
    def ids(self) -> memoryview:
        return memoryview(self.prompt_ids)[: self.id_bytes]

    @property
    def size_bytes(self) -> int:
        # Hashes take three tenths of the ids.
        return len(self.prompt_ids) * 13 // 10 + len(self.prompt) * (1 if self.prompt.isascii() else 4)


class RecentPrefixes:
    """The last ones, within `capacity_bytes` of memory."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._prefixes: deque[Prefix] = deque()
        self.bytes = 0

    def of(self, text: str) -> Prefix | None:
        """The latest that `text` begins with."""
        if len(text) < _SHORTEST:
            return None
        return next((prefix for prefix in self._prefixes if prefix.begins(text)), None)

    def put(self, prompt: str, length: int, prompt_ids: bytes, id_bytes: int) -> Prefix | None:
        """Remember a prompt's first `length` characters; None when they are too few or the prompt is too large."""
        prefix = Prefix(prompt, length, prompt_ids, id_bytes)
        if length < _SHORTEST or prefix.size_bytes > self._capacity:
            return None
        self._prefixes.appendleft(prefix)
        self.bytes += prefix.size_bytes
        while self.bytes > self._capacity or len(self._prefixes) > _MOST:
            self.bytes -= self._prefixes.pop().size_bytes
        return prefix
