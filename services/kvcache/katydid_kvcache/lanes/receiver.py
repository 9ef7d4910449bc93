"""A process that receives blocks straight into the arena: over bulk lanes, or by stream where there are none.

It is given the arena's descriptor and size, and a socket for what `orders` describes. Lanes and connections stay open
for the next order to the same address. It ends when its socket does.
"""

from __future__ import annotations

import socket
import sys
import threading

from katydid_cache.allocation import keep_buffers_mapped
from katydid_cache.arena import ArenaMapping
from katydid_cache.lane import Lane, receive

from katydid_kvcache.lanes.orders import ARRIVED_NOT, MESSAGE_BYTES, Credentials, LaneOrder, unpack_order
from katydid_kvcache.lanes.stream_reads import StreamReads

__all__ = ["main"]


class LaneReads:
    """Blocking reads over lanes into `memory`; `read` gives what an order's answer says."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._lanes: dict[tuple[str, int], Lane] = {}

    def read(self, order: LaneOrder) -> list[bytes]:
        where, intact = (order.host, order.port), list[bool]()
        buffers = [self._memory[offset : offset + order.block_bytes] for offset, _ in order.places]
        checksums = [checksum for _, checksum in order.places]
        try:
            lane = self._lanes.pop(where, None)
            self._lanes[where] = receive(lane, where, order.stall_s, order.token, buffers, checksums, intact)
        except OSError as error:
            print(f"lane to {order.host}:{order.port} broke: {error}", file=sys.stderr, flush=True)
        intact += [False] * (len(checksums) - len(intact))
        return [checksum if good else ARRIVED_NOT for checksum, good in zip(checksums, intact, strict=True)]


def main(arena: int, size: int, orders: socket.socket) -> None:
    """Serve until the other end of `orders` is closed."""
    keep_buffers_mapped()
    credentials = Credentials.unpack(orders.recv(MESSAGE_BYTES))
    mapping = ArenaMapping(arena, size)
    # A page that is first touched while it is received into takes as long as the copy.
    threading.Thread(target=mapping.prefault, name="prefault", daemon=True).start()
    lanes, streams = LaneReads(mapping.view), StreamReads(mapping.view, credentials)
    while message := orders.recv(MESSAGE_BYTES):
        order = unpack_order(message)
        orders.send(b"".join(lanes.read(order) if isinstance(order, LaneOrder) else streams.read(order)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3])))
