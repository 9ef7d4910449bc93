"""A folder that lives as long as its process; what a killed one has left is swept by the next that starts.

The owner holds a lock on the folder itself, which the kernel gives back however the process ends. Process ids would not
do: they are used again, and containers that share a /tmp do not share them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["process_folder"]

_HELD = ".held"
"""Ends the names of folders that have a lock: one without it that nobody has locked may still be in use."""


@contextlib.contextmanager
def process_folder(prefix: str) -> Iterator[Path]:
    """A new folder of this process in the system's place for such, removed with all in it when the block ends.

    Folders that this function made under the same prefix, and whose owners are dead, are removed first.
    """
    place = Path(tempfile.gettempdir())
    for left in place.glob(f"{prefix}*{_HELD}"):
        _sweep(left)
    folder, lock = _made(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _made(prefix: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(_HELD, prefix))
        lock = _locked(folder)
        if lock is None:
            continue
        if folder.exists():
            return folder, lock
        # Another process has swept it between its making and its lock.
        os.close(lock)


def _sweep(folder: Path) -> None:
    lock = _locked(folder)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where another has it, or it is gone or not ours."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
