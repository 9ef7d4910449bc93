"""Checksums of payloads: xxh3-128, also over pieces, as a rank's heads are of every layer; and the GPU's linear one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_128, xxh3_128_digest

__all__ = ["CHECKSUM_BYTES", "linear_checksum", "payload_checksum"]

CHECKSUM_BYTES = 16


def payload_checksum(block: memoryview, runs: Sequence[range]) -> bytes:
    """Checksum of the bytes of `block` in `runs`, in a row; 16 bytes, big-endian."""
    if len(runs) == 1:
        return xxh3_128_digest(block[runs[0].start : runs[0].stop])
    state = xxh3_128()
    for run in runs:
        state.update(block[run.start : run.stop])
    return state.digest()


def linear_checksum(block: memoryview) -> int:
    """64-bit linear checksum of a whole block: what `katydid_kernels.kv_pack` makes on the GPU.

    The sum over little-endian 64-bit words w_i of w_i * (2 i + 1), modulo 2^64. 0 stands for "none" wherever checksums
    are kept, so a block whose sum is 0 is one that nobody checks by it.
    """
    words = np.frombuffer(block, dtype="<u8")
    return int(np.dot(words, np.arange(1, 2 * len(words), 2, dtype=np.uint64)))
