"""A cache service's memory on a GPU's rank, with what registers it replaced: who waits for whom."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from katydid_engine import mapped_arena
from katydid_engine.mapped_arena import MappedArena
from torch import Tensor

PIECE, PIECES, OBJECT = 64 * 1024, 200, 8 * 1024


def test_a_step_waits_for_its_own_pieces_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "arena"
    path.write_bytes(bytes(PIECE * PIECES))
    registered: list[int] = []
    half = threading.Event()

    def register(memory: Tensor) -> None:
        time.sleep(0.002)
        registered.append((memory.data_ptr() - base[0]) // PIECE if base else 0)
        if len(registered) == 20:
            half.set()

    base: list[int] = []
    monkeypatch.setattr(mapped_arena, "_PIECE_BYTES", PIECE)
    monkeypatch.setattr(mapped_arena, "register_memory", register)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    arena = MappedArena(str(path), PIECE * PIECES, OBJECT, torch.device("cuda"))
    base.append(arena.rows.data_ptr())
    assert half.wait(20)
    # Each row spans two pieces.
    wanted = [190, 150, 170]
    before = len(registered)
    arena.prepare(piece * PIECE // 4096 - 1 for piece in wanted)
    found = registered[before:]
    assert [piece for piece in found if piece > 120] == [189, 190, 149, 150, 169, 170]
    assert len(found) <= 6 + 2, "beside the step's own at most what the thread had begun"
    count = len(registered)
    arena.prepare([190 * PIECE // 4096])
    assert len(registered) <= count + 1
    deadline = time.monotonic() + 20
    while len(registered) < PIECES:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert sorted(registered) == list(range(PIECES)), "all, and each once"
