"""The 64-bit linear checksum of a store object, as a CPU computes it: what the GPU kernels' sums are compared with.

    checksum = sum over i of m(i) * w(i)   mod 2^64
    w(i)     the i-th 32-bit little-endian word of the whole object
    m(i)     = z ^ (z >> 31), made odd, where
               z = (i + 1) * 0x9E3779B97F4A7C15
               z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
               z = (z ^ (z >> 27)) * 0x94D049BB133111EB          all mod 2^64

m is the splitmix64 sequence (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), the sum
multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014). Words of 32 bits against
multipliers of 64 keep every bit of a word away from the top of the sum, where 64-bit words would let two flipped top
bits cancel; an odd multiplier lets no change of one word pass. The sum is linear: what ranks and layer ranges sum over
their own bytes adds up, in any order, to the checksum of the object.

It finds faults, not forgers: whoever can choose bytes can choose them to agree.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

__all__ = ["linear_checksum", "multipliers", "published_checksum"]

_MASK = 2**64 - 1


def multipliers(first: int, count: int) -> NDArray[np.uint64]:
    """``m(first) ... m(first + count - 1)``."""
    z = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: NDArray[np.uint64] = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return odd


_whole_object = functools.lru_cache(maxsize=4)(multipliers)


def linear_checksum(data: bytes | bytearray | memoryview, *, first_byte: int = 0) -> int:
    """The part of an object's checksum that ``data`` contributes, 0 to 2^64 - 1; all of it for the whole object.

    Args:
        data: a multiple of 4 bytes.
        first_byte: where in its object `data` begins, a multiple of 4.

    Raises ValueError for a length or place that is not a multiple of 4.
    """
    words = memoryview(data).cast("B")
    if len(words) % 4 or first_byte % 4:
        raise ValueError(f"data must be whole 32-bit words of an object, got {len(words)} bytes at byte {first_byte}")
    values = np.frombuffer(words, dtype="<u4")
    make = _whole_object if first_byte == 0 else multipliers
    return int(np.dot(values, make(first_byte // 4, len(values))))


def published_checksum(total: int) -> int:
    """A finished sum as it is stored and sent, where 0 stands for unknown: a sum of 0 becomes 2^64 - 1.

    Args:
        total: the sum as a signed or unsigned 64-bit number.
    """
    return total & _MASK or _MASK
