"""A worker process that receives blocks over bulk lanes straight into the arena.

It is given the arena's descriptor and size, and a socket for orders, one at a time: where to connect, which token to
show, where each block belongs and what its checksum must be. It answers with a byte a block: 1 arrived right, 0 did
not. A lane stays open for the next order to the same address. It ends when its socket does.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from katydid_cache.arena import ArenaMapping
from katydid_cache.lane import CHECKSUM_BYTES, TOKEN_BYTES, Lane, receive

__all__ = ["ORDER_BYTES", "Order", "main"]

ORDER_BYTES = 1 << 17
"""An order is at most so long, as a message of its socket."""

_HEAD = struct.Struct(f"<QdHH{TOKEN_BYTES}s")
_PLACE = struct.Struct(f"<Q{CHECKSUM_BYTES}s")


@dataclass(frozen=True, slots=True)
class Order:
    """Blocks of `block_bytes` to fetch for `token` at `host`:`port`, each to an arena offset with its checksum."""

    host: str
    port: int
    token: bytes
    stall_s: float
    block_bytes: int
    places: Sequence[tuple[int, bytes]]

    def pack(self) -> bytes:
        host = self.host.encode()
        head = _HEAD.pack(self.block_bytes, self.stall_s, self.port, len(host), self.token)
        return b"".join((head, host, *(_PLACE.pack(*place) for place in self.places)))

    @classmethod
    def unpack(cls, message: bytes) -> Order:
        block_bytes, stall_s, port, host_bytes, token = _HEAD.unpack_from(message)
        at = _HEAD.size + host_bytes
        host = message[_HEAD.size : at].decode()
        return cls(host, port, token, stall_s, block_bytes, list(_PLACE.iter_unpack(message[at:])))


def main(arena: int, size: int, orders: socket.socket) -> None:
    """Serve until the other end of `orders` is closed."""
    mapping = ArenaMapping(arena, size)
    # A page that is first touched while it is received into takes as long as the copy.
    threading.Thread(target=mapping.prefault, name="prefault", daemon=True).start()
    lanes: dict[tuple[str, int], Lane] = {}
    while message := orders.recv(ORDER_BYTES):
        order = Order.unpack(message)
        intact: list[bool] = []
        try:
            _fetch(order, mapping.view, lanes, intact)
        except OSError as error:
            print(f"lane to {order.host}:{order.port} broke: {error}", file=sys.stderr, flush=True)
        orders.send(bytes(intact) + bytes(len(order.places) - len(intact)))


def _fetch(order: Order, memory: memoryview, lanes: dict[tuple[str, int], Lane], intact: list[bool]) -> None:
    where = order.host, order.port
    buffers = [memory[offset : offset + order.block_bytes] for offset, _ in order.places]
    checksums = [checksum for _, checksum in order.places]
    lanes[where] = receive(lanes.pop(where, None), where, order.stall_s, order.token, buffers, checksums, intact)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3])))
