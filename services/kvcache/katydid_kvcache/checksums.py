"""Checksums of payloads: xxh3-128, also over pieces, as a rank's heads are of every layer; and the GPU's linear one."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128, xxh3_128_digest

__all__ = ["CHECKSUM_BYTES", "linear_checksum", "payload_checksum"]

CHECKSUM_BYTES = 16
_MASK = 2**64 - 1
_PIECE_WORDS = 128 * 1024


def payload_checksum(block: memoryview, runs: Sequence[range]) -> bytes:
    """Checksum of the bytes of `block` in `runs`, in a row; 16 bytes, big-endian."""
    if len(runs) == 1:
        return xxh3_128_digest(block[runs[0].start : runs[0].stop])
    state = xxh3_128()
    for run in runs:
        state.update(block[run.start : run.stop])
    return state.digest()


def linear_checksum(block: memoryview) -> int:
    """64-bit linear checksum of a whole block, as GPUs make it while they pack: 1 to 2^64 - 1.

    The definition, its reasons and its sources are those of `katydid_kernels.kv_pack.checksum`: the sum of the block's
    32-bit little-endian words, each times an odd number of the splitmix64 sequence, modulo 2^64. 0 stands for "not
    known" wherever such checksums are kept, so a sum of 0 becomes 2^64 - 1.
    """
    words = np.frombuffer(block, dtype="<u4")
    total = 0
    for first in range(0, len(words), _PIECE_WORDS):
        piece = words[first : first + _PIECE_WORDS]
        # `dot` takes half as long as a product and its sum, and wraps around like them.
        total += int(np.dot(piece, _multipliers(first)[: len(piece)]))
    return total & _MASK or _MASK


@functools.lru_cache(maxsize=256)
def _multipliers(first: int) -> npt.NDArray[np.uint64]:
    """For the words of one piece."""
    z = np.arange(first + 1, first + _PIECE_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: npt.NDArray[np.uint64] = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return odd
