"""Limits of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from katydid_engine.sparse_prefill import SparsePrefill

__all__ = ["SchedulerConfig"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one scheduler.

    Attributes:
        max_model_tokens: longest prompt plus output; at most what the pages hold.
        max_batch_tokens: tokens a step computes at most; at least ``max_sequences``.
        max_sequences: sequences in a step at most.
        eos_token_ids: tokens that end every output but those with ``ignore_eos``.
        watermark_pages: pages that an admission leaves free for running sequences to grow into.
        max_bypass: how often a sequence that does not fit is passed by ones behind it.
        sparse: how prompts that may be computed sparsely are, if they are long enough; None where none is.
        queue_delay_s: a fault for tests: nobody is admitted before this time after arrival.

    Raises:
        ValueError: ``max_batch_tokens`` is below ``max_sequences``.
    """

    max_model_tokens: int
    max_batch_tokens: int
    max_sequences: int
    eos_token_ids: frozenset[int] = frozenset()
    watermark_pages: int = 0
    max_bypass: int = 64
    sparse: SparsePrefill | None = None
    queue_delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.max_batch_tokens < self.max_sequences:
            raise ValueError(
                f"max_batch_tokens={self.max_batch_tokens}: expected at least max_sequences={self.max_sequences}"
            )
