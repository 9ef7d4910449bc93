"""xxh3-128 over a payload that may lie in pieces, as it does where a rank's heads are a part of every layer."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_128, xxh3_128_digest

__all__ = ["CHECKSUM_BYTES", "payload_checksum"]

CHECKSUM_BYTES = 16


def payload_checksum(block: memoryview, runs: Sequence[range]) -> bytes:
    """Checksum of the bytes of `block` in `runs`, in a row; 16 bytes, big-endian."""
    if len(runs) == 1:
        return xxh3_128_digest(block[runs[0].start : runs[0].stop])
    state = xxh3_128()
    for run in runs:
        state.update(block[run.start : run.stop])
    return state.digest()
