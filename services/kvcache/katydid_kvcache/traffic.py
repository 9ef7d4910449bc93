"""Payload bytes that went out and came in, and blocks pulled: counted where they move, read by Stats and metrics."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Traffic"]


@dataclass(slots=True)
class Traffic:
    """Since the start. Bytes that clients read and write in place are not seen here."""

    sent_bytes: int = 0
    received_bytes: int = 0
    pulled_blocks: int = 0
    pulled_bytes: int = 0
    broken_lanes: int = 0
