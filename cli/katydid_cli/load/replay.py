"""Workloads out of published traces in Mooncake's format.

One JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one id a block of 512
input tokens; equal ids mean equal prefixes up to the end of that block). Lengths can be scaled down to what a small
model holds: a block then has 512 x scale tokens, and what was shared stays shared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from katydid_runtime.errors import SettingsError

from katydid_cli.load.workload import Piece, Session, Turn

__all__ = ["BLOCK_TOKENS", "parse_trace", "read_trace"]

BLOCK_TOKENS = 512


def read_trace(
    path: Path, *, limit: int | None = None, speed: float = 1.0, scale: float = 1.0, max_input_tokens: int | None = None
) -> list[Session]:
    """Sessions of the first `limit` requests in `path`. Raises SettingsError naming file and line."""
    try:
        with path.open(encoding="utf-8") as lines:
            return parse_trace(lines, str(path), limit, speed, scale, max_input_tokens)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"cannot read trace {path}: {reason}", field="replay", value=str(path)) from error


def parse_trace(
    lines: Iterable[str],
    name: str,
    limit: int | None = None,
    speed: float = 1.0,
    scale: float = 1.0,
    max_input_tokens: int | None = None,
) -> list[Session]:
    """Sessions of the lines of a trace called `name`; `speed` 2 replays it in half the time."""
    sessions: list[Session] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(sessions) >= limit:
            break
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            start_s = float(entry["timestamp"]) / 1e3 / speed
            tokens = max(1, round(int(entry["input_length"]) * scale))
            output_tokens = max(1, round(int(entry["output_length"]) * scale))
            hash_ids = [int(hash_id) for hash_id in entry["hash_ids"]]
        except (ValueError, TypeError, KeyError) as error:
            raise SettingsError(f"{name}:{number} is no trace entry: {error}", field="replay", value=line) from None
        if max_input_tokens is not None:
            tokens = min(tokens, max_input_tokens)
        sessions.append(Session(start_s, (Turn(_pieces(hash_ids, tokens, scale, number), output_tokens),)))
    if not sessions:
        raise SettingsError(f"{name} holds no trace entries", field="replay", value=name)
    first = min(session.start_s for session in sessions)
    return [Session(session.start_s - first, session.turns) for session in sessions]


def _pieces(hash_ids: list[int], tokens: int, scale: float, number: int) -> tuple[Piece, ...]:
    """Full blocks by their hash id; what the ids do not cover belongs to this request alone."""
    block = max(1, round(BLOCK_TOKENS * scale))
    pieces: list[Piece] = []
    left = tokens
    for hash_id in hash_ids:
        if left <= 0:
            break
        pieces.append(Piece(f"block-{hash_id}", min(block, left)))
        left -= block
    if left > 0:
        pieces.append(Piece(f"rest-{number}", left))
    return tuple(pieces)
