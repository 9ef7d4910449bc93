"""What blocks from the cache service mean to the sequences that asked for them: when these go on, and when not. Pure.

A sequence computes in the very step that unpacks the last of its blocks, each layer when that layer has come, if nobody
decodes beside it who would wait with it. It relies then on blocks whose checksums are not known yet: they come with the
step's output, and where one is wrong the sequence is computed again, before any of it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from katydid_engine.kv_traffic import Arrival
from katydid_engine.request import Phase, Sequence
from katydid_engine.residency import Residency

__all__ = ["Fetched"]


class Fetched:
    """Of one scheduler, which says how a sequence is computed and how it is preempted."""

    def __init__(
        self, queues: Residency, *, compute: Callable[[Sequence], None], preempt: Callable[[Sequence], None]
    ) -> None:
        self._queues = queues
        self._compute = compute
        self._preempt = preempt

    def begin(self, now: float, *, decodes: bool) -> tuple[Arrival, ...]:
        """What has arrived, for this step to unpack; sequences that need not wait for more are to be computed now."""
        kv, unpacking = self._queues.kv, []
        for arrival in kv.take_arrivals():
            ticket, sequence = arrival.ticket, arrival.ticket.sequence
            if not (arrival.transfers or ticket.taken):
                self.commit(arrival, (), now)  # the end of a ticket whose blocks have all been unpacked
                continue
            unpacking.append(arrival)
            # The last token alone would be a decode.
            behind = ticket.taken_tokens < sequence.num_tokens - 1 and not sequence.request.fetch_only
            if arrival.last and not decodes and behind:
                kv.go_on(ticket)
                sequence.num_computed = ticket.taken_tokens
                self._compute(sequence)
        return tuple(unpacking)

    def rely(self, sequences: Iterable[Sequence], unpacking: tuple[Arrival, ...]) -> bool:
        """Whether one of the sequences reads blocks that this step or one before it unpacks."""
        tickets = (arrival.ticket for arrival in (*self._queues.moves.arrivals(), *unpacking))
        relying = {ticket.sequence.id for ticket in tickets if ticket.computing}
        return any(sequence.id in relying for sequence in sequences)

    def commit(self, arrival: Arrival, sums: tuple[int, ...], now: float) -> None:
        """Blocks have been unpacked and had these checksums."""
        ticket, sequence = arrival.ticket, arrival.ticket.sequence
        if not self._queues.kv.unpacked(arrival, sums):
            return
        if not ticket.computing:
            sequence.num_computed = sequence.num_scheduled = ticket.loaded_tokens
        self._queues.publish(sequence, ticket.loaded_tokens, computed=False)
        if not sequence.live.has_first_token:
            sequence.live.cached = ticket.cached(sequence.most_reused)
        if ticket.computing:
            if ticket.wrong:
                self._preempt(sequence)
        elif ticket.ended:
            self._compute(sequence)
        elif (tier := ticket.next_tier) is not None:
            sequence.live.enter(Phase.FETCH, now, tier, ticket.fetch_span_id)
