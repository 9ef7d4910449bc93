"""The receiving end of a bulk lane: raw blocks over TCP straight into their buffers, checked as they arrive.

What a lane carries was settled by OpenLane over gRPC (OpenLaneResponse in the protocol is the wire format), so the
bytes need no frames: a token goes up, blocks come down back to back, a receipt goes up. The hash runs over each piece
while it is still in the processor's cache. Blocking, for a thread or a process of its own; a connection serves one
token after another.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Sequence

from xxhash import xxh3_128

__all__ = ["CHECKSUM_BYTES", "RECEIPT", "TOKEN_BYTES", "Lane", "end_silence_after", "receive"]

TOKEN_BYTES = 16
CHECKSUM_BYTES = 16
RECEIPT = struct.Struct("<I")
"""The receipt's words: how many blocks were wrong, then the place of each."""

_PIECE_BYTES = 256 * 1024


class Lane:
    """A connection to the lane port of a service; `stall_s` is the longest silence. Raises OSError."""

    def __init__(self, host: str, port: int, *, stall_s: float) -> None:
        self._connection = socket.create_connection((host, port), timeout=stall_s)
        end_silence_after(self._connection, stall_s)

    def receive(
        self, token: bytes, buffers: Sequence[memoryview], checksums: Sequence[bytes], intact: list[bool]
    ) -> None:
        """Fill `buffers` with the blocks of `token` and append to `intact` whether each has its checksum.

        Raises OSError when the lane breaks; what was appended by then holds.
        """
        connection = self._connection
        connection.sendall(token)
        for buffer, checksum in zip(buffers, checksums, strict=True):
            intact.append(self._block(buffer) == checksum)
        wrong = [place for place, good in enumerate(intact) if not good]
        connection.sendall(b"".join(RECEIPT.pack(word) for word in (len(wrong), *wrong)))

    def interrupt(self) -> None:
        """From another thread: end `receive` at once, with an OSError."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _block(self, buffer: memoryview) -> bytes:
        digest, at = xxh3_128(), 0
        while at < len(buffer):
            size = self._connection.recv_into(buffer[at : at + _PIECE_BYTES], 0, socket.MSG_WAITALL)
            if not size:
                raise ConnectionError("the lane was closed in mid-block")
            digest.update(buffer[at : at + size])
            at += size
        return digest.digest()


def receive(
    lane: Lane | None,
    where: tuple[str, int],
    stall_s: float,
    token: bytes,
    buffers: Sequence[memoryview],
    checksums: Sequence[bytes],
    intact: list[bool],
    opened: Callable[[Lane], None] = lambda _: None,
) -> Lane:
    """`Lane.receive` over `lane` or, where there is none or it was closed while idle, a fresh one; the lane used.

    `opened` is told of a fresh one, so that others can interrupt it. Raises OSError, the lane closed.
    """
    if lane is not None:
        try:
            lane.receive(token, buffers, checksums, intact)
            return lane
        except OSError:
            lane.close()
            if intact:
                raise
            # If the token was read all the same, the fresh lane is refused, and that is that.
    lane = Lane(*where, stall_s=stall_s)
    opened(lane)
    try:
        lane.receive(token, buffers, checksums, intact)
    except OSError:
        lane.close()
        raise
    return lane


def end_silence_after(connection: socket.socket, stall_s: float) -> None:
    """Have blocking calls on `connection` fail with an OSError after `stall_s`, without a poll before each of them."""
    timeout = struct.pack("@ll", int(stall_s), int(stall_s % 1 * 1e6))
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
