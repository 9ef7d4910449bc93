"""The service's shared memory, mapped into this process: received once an attachment, over a Unix socket.

Whoever computes on a GPU maps it in its own process and registers it there (`katydid_kernels.register_memory`).
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import socket
import weakref

from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.errors import UnavailableError

__all__ = ["ArenaMapping"]

_TIMEOUT_S = 5.0
_POPULATE_WRITE = 23  # madvise, since Linux 5.14
_PREFAULT_BYTES = 16 * 1024 * 1024


class ArenaMapping:
    """`bytes` of shared memory. It stays mapped, whatever becomes of the service, until the last view of it is gone.

    `descriptor` is its memfd and stays open while this object lives: other processes can map the memory by it.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.bytes = size
        self._map = mmap.mmap(descriptor, size)
        self.view = memoryview(self._map)
        self.dropped = False
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)

    def prefault(self) -> None:
        """Have the kernel map every page here, which costs more at the first touch than copying does.

        For a thread; ends early where the kernel knows no such advice, and once `dropped` is set.
        """
        madvise = ctypes.CDLL(None).madvise
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for start in range(0, self.bytes, _PREFAULT_BYTES):
            size = min(_PREFAULT_BYTES, self.bytes - start)
            if self.dropped or madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(size), _POPULATE_WRITE):
                return

    @classmethod
    async def receive(cls, arena: pb.Arena) -> tuple[ArenaMapping, socket.socket]:
        """Show the token and map what comes; also the connection it came over, which is good for calls.

        Raises UnavailableError when nothing comes.
        """
        try:
            descriptor, connection = await asyncio.to_thread(_receive, arena.socket_path, arena.token)
        except OSError as error:
            raise UnavailableError(f"the cache service did not pass its memory: {error}") from error
        try:
            return cls(descriptor, arena.bytes), connection
        except (OSError, ValueError) as error:
            connection.close()
            raise UnavailableError(f"the memory of the cache service can't be mapped: {error}") from error
        finally:
            os.close(descriptor)


def _receive(path: str, token: bytes) -> tuple[int, socket.socket]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(path)
        connection.sendall(token)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise ConnectionError("the token was refused")
    except OSError:
        connection.close()
        raise
    os.set_inheritable(descriptors[0], False)
    return descriptors[0], connection
