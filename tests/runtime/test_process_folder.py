"""Folders of a process: gone with it, and swept by the next one where it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from katydid_runtime.process_folder import process_folder

HOLDS_ONE = """
import sys
from katydid_runtime.process_folder import process_folder
with process_folder("katydid-test-") as folder:
    (folder / "inside").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def owner() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)
    process.communicate(timeout=20)


def test_it_is_gone_with_its_block() -> None:
    with process_folder("katydid-test-") as folder:
        (folder / "file").write_text("x")
        assert folder.is_dir()
    assert not folder.exists()


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    killed, left = owner()
    living, kept = owner()
    end(killed, signal.SIGKILL)
    assert left.is_dir(), "nobody could clean up"
    others = [tmp_path / name for name in ("katydid-others.held", "katydid-test-unlocked")]
    for other in others:
        other.mkdir()
    with process_folder("katydid-test-") as own, process_folder("katydid-test-") as second:
        assert not left.exists()
        assert (kept / "inside").is_dir(), "its owner is alive"
        assert own.is_dir(), "a process does not sweep its own"
        assert second.is_dir()
        assert all(other.is_dir() for other in others), "other names"
    end(living, signal.SIGTERM)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    os.symlink(precious, tmp_path / "katydid-test-link.held")
    with process_folder("katydid-test-"):
        assert (precious / "file").exists()


def test_its_lock_is_not_inherited_by_what_it_starts() -> None:
    """Workers outlive a killed engine for a moment: they must not keep its folder."""
    with process_folder("katydid-test-") as folder:
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        try:
            held = {os.path.realpath(entry) for entry in Path(f"/proc/{child.pid}/fd").iterdir()}
            assert str(folder.resolve()) not in held
        finally:
            child.communicate(timeout=20)
