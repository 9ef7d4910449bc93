"""Messages between the face and its workers over a socket pair: four bytes of length, then the pickled record.

Both ends belong to one process group that the face started itself; nothing else can reach the sockets. The face's end
is asynchronous and never blocks its loop. The worker's end sends blocking and takes in what has come between steps.
"""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
from typing import Any

__all__ = ["BlockingChannel", "ChannelClosed", "FaceChannel"]

_LENGTH_BYTES = 4
_READ_BYTES = 1 << 20


class ChannelClosed(ConnectionError):  # noqa: N818 - the other process ended
    """The other end is gone."""


def _frame(message: object) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class BlockingChannel:
    """The worker's end."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Raises ChannelClosed."""
        try:
            self._socket.sendall(_frame(message))
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float) -> list[Any]:
        """What has come, waiting ``timeout_s`` at most for the first message. Raises ChannelClosed."""
        messages: list[Any] = []
        while select.select([self._socket], [], [], 0 if messages else timeout_s)[0]:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the face has ended")
            self._received += data
            messages += self._take()
        return messages

    def close(self) -> None:
        self._socket.close()

    def _take(self) -> list[Any]:
        messages = []
        while len(self._received) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._received[:_LENGTH_BYTES], "big")
            if len(self._received) < end:
                break
            messages.append(pickle.loads(memoryview(self._received)[_LENGTH_BYTES:end]))
            del self._received[:end]
        return messages


class FaceChannel:
    """The face's end; use ``open``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> FaceChannel:
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer)

    def send(self, message: object) -> None:
        """Queues a message; once the worker is gone it is dropped, and ``receive`` tells."""
        if not self._writer.is_closing():
            self._writer.write(_frame(message))

    async def receive(self) -> Any:
        """The next message. Raises ChannelClosed."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            return pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChannelClosed("the worker has ended") from error

    def close(self) -> None:
        self._writer.close()
