"""Few rows of every rank to all that hold experts, and the sums over them back, by kernels that write into each other's
GPUs.

Where all ranks together have few rows the wait is what an exchange costs, not what is sent. So all rows go to all, each
rank routes them all and computes what its experts add, and the sums go to all as well: nobody tells another which rows
are for whom. A kernel that does so waits for peers a few microseconds, messages of the general way several times that.
"""

from __future__ import annotations

from torch import Tensor

from katydid_engine.layers.few_rows_exchange import FewRowPeers

__all__ = ["RowsToAll"]


class RowsToAll:
    """One rank's end.

    Args:
        peers: sums bf16 rows over the ranks that hold experts.
        rank: this one among them.
        size: how many those are.
    """

    def __init__(self, peers: FewRowPeers, rank: int, size: int) -> None:
        self._peers, self._rank, self._size = peers, rank, size

    def takes(self, room: int | None) -> bool:
        """Whether as many rows of each rank go this way; all ranks agree on ``room`` before a pass."""
        return room is not None and self._size * room <= self._peers.few_tokens

    def gather(self, own: Tensor, room: int) -> Tensor:
        """bf16 ``[rows, hidden]`` of each rank -> ``[size * room, hidden]`` of all: a rank's from ``rank * room`` on,
        zeros behind its last."""
        everyones = own.new_zeros((self._size * room, own.shape[1]))
        first = self._rank * room
        everyones[first : first + len(own)] = own
        return self._peers.sum_few(everyones, overlap=True)

    def own_sums(self, computed: Tensor, rows: int) -> Tensor:
        """What each rank's experts made of gathered rows, ``[size * room, hidden]`` -> the sums of this rank's
        ``rows``."""
        first = self._rank * (len(computed) // self._size)
        return self._peers.sum_few(computed.contiguous(), overlap=True)[first : first + rows]
