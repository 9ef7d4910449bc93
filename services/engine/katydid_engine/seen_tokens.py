"""Which tokens each penalised sequence has seen, in one table on the device that steps keep without the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from katydid_kernels.sample import seen_tokens
from torch import Tensor

from katydid_engine.host_copies import integers, to_device
from katydid_engine.sequence_sampler import SequenceSampler

__all__ = ["SeenTokens"]

_FIRST_SLOTS = 8


class SeenTokens:
    """A slot a sequence, filled when it is first sampled and from then on by ``verify_draft``: a step costs the same
    however long the sequence is.

    Attributes:
        outgrown: whether there were once more sequences with penalties than ``reserve`` made room for, so that the
            table may have moved; the same on all ranks.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[int, int] = {}
        self._penalised: set[int] = set()
        self._reserved = 0
        self.outgrown = False
        self._free: list[int] = []
        self.table = torch.zeros((0, vocab_size), dtype=torch.int16, device=device)

    def reserve(self, sequences: int) -> None:
        """Makes room for so many: up to there the table stays where it is."""
        self._reserved = max(self._reserved, sequences)
        if len(self.table) < sequences:
            self._grow(sequences)

    def begin(self, sequence: SequenceSampler) -> None:
        if sequence.penalises:
            self._penalised.add(sequence.id)
            self.outgrown |= len(self._penalised) > self._reserved

    def numbers(self, sequences: Sequence[SequenceSampler]) -> list[int]:
        """Rows of ``table``, -1 where a sequence has no penalties."""
        return [self._slot(sequence) if sequence.penalises else -1 for sequence in sequences]

    def slots(self, sequences: Sequence[SequenceSampler], owned: Sequence[bool] | None = None) -> Tensor | None:
        """``numbers`` as int32 ``[R]``, -1 also where a sequence is not ``owned``; None where none has penalties."""
        slots = self.numbers(sequences)
        if all(slot < 0 for slot in slots):
            return None
        if owned is not None:
            slots = [slot if own else -1 for slot, own in zip(slots, owned, strict=True)]
        return integers(slots, self._device)

    def end(self, sequence: int) -> None:
        """A sequence is gone; one that never had a slot is no error."""
        self._penalised.discard(sequence)
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            self._free.append(slot)

    def _slot(self, sequence: SequenceSampler) -> int:
        slot = self._slots.get(sequence.id)
        if slot is None:
            if not self._free:
                self._grow(max(_FIRST_SLOTS, 2 * len(self.table)))
            slot = self._slots[sequence.id] = self._free.pop()
            tokens, end = np.frombuffer(sequence.start.tokens, dtype=np.int32), sequence.start.num_prompt
            prompt, output = (torch.from_numpy(part.copy()) for part in (tokens[:end], tokens[end:]))
            self.table[slot] = to_device(seen_tokens(prompt, output, self._vocab_size), self._device)
        return slot

    def _grow(self, sequences: int) -> None:
        size = len(self.table)
        larger = torch.zeros((sequences, self._vocab_size), dtype=torch.int16, device=self._device)
        larger[:size] = self.table
        self.table = larger
        self._free += range(sequences - 1, size - 1, -1)
