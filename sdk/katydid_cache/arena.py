"""The service's shared memory, mapped into this process: received once an attachment, over a Unix socket."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket

from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.errors import UnavailableError

__all__ = ["ArenaMapping"]

_TIMEOUT_S = 5.0


class ArenaMapping:
    """`bytes` of shared memory. It stays mapped, whatever becomes of the service, until the last view of it is gone."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.bytes = size
        self._map = mmap.mmap(descriptor, size)
        self.view = memoryview(self._map)

    @classmethod
    async def receive(cls, arena: pb.Arena) -> ArenaMapping:
        """Show the token and map what comes. Raises UnavailableError when nothing does."""
        try:
            descriptor = await asyncio.to_thread(_receive, arena.socket_path, arena.token)
        except OSError as error:
            raise UnavailableError(f"the cache service did not pass its memory: {error}") from error
        try:
            return cls(descriptor, arena.bytes)
        except (OSError, ValueError) as error:
            raise UnavailableError(f"the memory of the cache service can't be mapped: {error}") from error
        finally:
            os.close(descriptor)


def _receive(path: str, token: bytes) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(path)
        connection.sendall(token)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise ConnectionError("the token was refused")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]
