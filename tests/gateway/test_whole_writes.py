"""A response's head leaves with what follows it, and never stays behind."""

from __future__ import annotations

from typing import Any

import pytest
from katydid_gateway.http.whole_writes import _Joining

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


class Socket:
    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ([HEAD, b"a", b"b"], [HEAD + b"a", b"b"]),
        ([HEAD, b"", b"b"], [HEAD, b"b"]),
        ([HEAD], [HEAD]),
        ([b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"x"], [b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"x"]),
        ([HEAD, b"a", HEAD, b"b"], [HEAD + b"a", HEAD + b"b"]),
    ],
)
def test_heads_are_joined_to_their_bodies(written: list[bytes], sent: list[bytes]) -> None:
    socket = Socket()
    joining: Any = _Joining(socket)  # type: ignore[arg-type]
    for part in written:
        joining.write(part)
    assert not joining.is_closing()
    joining.close()
    assert socket.writes == sent
    assert joining.is_closing()
