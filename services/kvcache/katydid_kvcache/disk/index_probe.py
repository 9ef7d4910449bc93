"""Reads every page of an LMDB index in a process of its own, because a rotten page can end the process that reads it.

Run as a script on the index folder; it imports nothing but lmdb, to cost a start little. Exit code 0 means that the
index can be opened, read to its end and written.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lmdb

__all__ = ["index_is_sound"]

_TIMEOUT_S = 60


def index_is_sound(folder: Path, map_bytes: int) -> bool:
    """Whether the index in `folder` can be used; False also when finding out took too long."""
    command = [sys.executable, __file__, str(folder), str(map_bytes)]
    try:
        return subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _read_and_write(folder: str, map_bytes: int) -> None:
    with lmdb.open(folder, map_size=map_bytes, max_dbs=8) as environment:
        with environment.begin() as transaction:
            names = [bytes(name) for name, _ in transaction.cursor()]
        tables = [environment.open_db(name, create=False) for name in names]
        with environment.begin() as transaction:
            for table in tables:
                for _ in transaction.cursor(db=table):
                    pass
        with environment.begin(write=True) as transaction:
            for table in tables:
                transaction.put(b"probe", b"", db=table)
                transaction.delete(b"probe", db=table)


if __name__ == "__main__":
    _read_and_write(sys.argv[1], int(sys.argv[2]))
