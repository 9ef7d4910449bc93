"""Text in pieces, each with the loss weight of its tokens: what generated tasks and dialogues are made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer


@dataclass
class Pieces:
    """Text pieces with weights, encoded together."""

    parts: list[tuple[str, float]] = field(default_factory=list)

    def add(self, text: str, weight: float) -> Pieces:
        self.parts.append((text, weight))
        return self

    def encode(self, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """ids uint16 and weights float16 of all pieces."""
        encoded = tokenizer.encode_batch_fast([t for t, _ in self.parts], add_special_tokens=False)
        ids = [np.asarray(e.ids, dtype=np.uint16) for e in encoded]
        weights = [np.full(len(i), w, dtype=np.float16) for i, (_, w) in zip(ids, self.parts, strict=True)]
        return np.concatenate(ids), np.concatenate(weights)
