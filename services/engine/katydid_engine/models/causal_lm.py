"""A decoder-only language model on one rank: embed, layers, final norm, head; what every architecture here shares."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from katydid_engine.forward_batch import ForwardBatch
from katydid_engine.kv_cache import KvCache
from katydid_engine.model_config import ModelConfig

__all__ = ["CausalLM"]


class CausalLM(Protocol):
    """What the runner calls; one implementation a file beside this one.

    Attributes:
        config: of the whole model, not of this rank's share.
        device: of weights, pages and batches.
        dtype: of hidden states and pages.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    def new_kv_cache(self, num_pages: int) -> KvCache:
        """Zeroed pages for this rank's KV heads, every layer (an MTP layer's last)."""
        ...

    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> Tensor:
        """Writes the batch's K and V into its pages and returns hidden states ``[T, hidden]`` after the final norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits ``[rows, vocab]`` of hidden rows ``[rows, hidden]`` (pick the rows that are sampled first)."""
        ...
