"""Who is let in from the waiting queue, and whom it takes the place of."""

from __future__ import annotations

from collections.abc import Callable

from katydid_engine.block_pool import BlockPool, IntegrityError
from katydid_engine.request import Sequence, pages_for
from katydid_engine.residency import Residency
from katydid_engine.scheduler_config import SchedulerConfig

__all__ = ["Admission"]

_LOOKAHEAD = 16


class Admission:
    """A sequence is let in with pages for its whole input and a watermark to spare. One that does not fit lets smaller
    ones pass, but only so often; ones of lower priority make room for it, and fetches alone for one that computes.
    ``load`` takes over who is let in, ``preempt`` takes a sequence's pages."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        queues: Residency,
        *,
        preempt: Callable[[Sequence], None],
        load: Callable[[Sequence, float], None],
    ) -> None:
        self._config = config
        self._pool = pool
        self._queues = queues
        self._preempt = preempt
        self._load = load

    def admit(self, now: float) -> None:
        """Moves waiting sequences to computing or loading while places and pages last."""
        places = self._config.max_sequences - sum(sequence.num_slots for sequence in self._queues.holders())
        passed: list[Sequence] = []
        for sequence in list(self._queues.waiting):
            if len(passed) == _LOOKAHEAD or any(other.bypassed >= self._config.max_bypass for other in passed):
                break
            if now < sequence.request.received_at + self._config.queue_delay_s:
                continue
            if places < sequence.num_slots or not self._queues.take_pages(sequence, self._spare_pages(sequence)):
                gained = self._preempt_for(sequence, places)
                if gained is None:
                    passed.append(sequence)
                    continue
                if gained < 0:
                    break
                places += gained
            places -= sequence.num_slots
            for other in passed:
                other.bypassed += 1
            self._load(sequence, now)

    def _spare_pages(self, sequence: Sequence) -> int:
        """Pages to leave free beside its own input; none when it runs alone, so that it can always run."""
        alone = next(self._queues.holders(), None) is None
        return 0 if alone else self._config.watermark_pages + sequence.num_slots - 1

    def _preempt_for(self, sequence: Sequence, places: int) -> int | None:
        """Admits a sequence in place of ones of lower priority and of fetches alone, if that suffices; returns the
        places they left, or -1 when their pages come with the end of the steps in flight: nobody else may have them."""
        lower = [other for other in self._queues.holders() if other.order[:2] > sequence.order[:2]]
        if not lower:
            return None
        if self._queues.pages_return:
            return -1
        gained = sum(other.num_slots for other in lower)
        pages = self._pool.num_available + sum(self._pool.count_sole(other.pages) for other in lower)
        needed = pages_for(sequence.num_tokens) + self._spare_pages(sequence)
        if places + gained < sequence.num_slots or pages < needed:
            return None
        gained = 0
        for victim in sorted(lower, key=lambda other: other.order, reverse=True):
            gained += victim.num_slots
            self._preempt(victim)
            if places + gained >= sequence.num_slots and self._queues.take_pages(sequence, self._spare_pages(sequence)):
                return gained
        if self._queues.pages_return:
            return -1
        raise IntegrityError("preemption freed fewer pages than counted")
