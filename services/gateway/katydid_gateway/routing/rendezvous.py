"""Rendezvous hashing: every key ranks all names, and keeps its ranking when a name comes or goes.

The first name is the key's home, the second its second home, and so on: overflow of one key always lands on the same
engine, so what that engine caches of it stays useful. (Thaler and Ravishankar, 1998.)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import lru_cache
from hashlib import sha256
from typing import TypeVar

__all__ = ["homes"]

T = TypeVar("T", bound=Hashable)


def homes(key: bytes, names: Iterable[T]) -> list[T]:
    """All names, the key's home first. Names are told apart by their `repr`."""
    return sorted(names, key=lambda name: (sha256(key + _said(name)).digest(), _said(name)))


@lru_cache(4096)
def _said(name: Hashable) -> bytes:
    return repr(name).encode()
