"""Models the engine serves, and the one call that brings a folder of weights to life.

>>> model = load_model(Path("~/models/smollm2"), device="cpu")
>>> cache = model.new_kv_cache(num_pages=128)
>>> hidden = model.forward(batch, cache)                      # [T, hidden], after the final norm
>>> logits = model.logits(hidden[batch.cu_q_lens[1:].long() - 1])   # [S, vocab], fp32
"""

from __future__ import annotations

from pathlib import Path

import torch

from katydid_engine.collectives import Collectives
from katydid_engine.models.causal_lm import CausalLM
from katydid_engine.parallel import ParallelPlan

__all__ = ["CausalLM", "load_model"]


def load_model(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    plan: ParallelPlan | None = None,
    collectives: Collectives | None = None,
) -> CausalLM:
    """Loads this rank's share of a Hugging Face model folder.

    Args:
        folder: holds ``config.json`` and safetensors shards.
        device: where weights and pages live.
        dtype: compute and KV dtype; by default fp32 on CPU (the reference path) and the checkpoint's dtype elsewhere.
        plan: how the model is cut; by default one rank holds all of it.
        collectives: the TP group; its ``size`` must equal ``plan.tp``. By default a group of one.

    Raises:
        ModelConfigError: the config is absent, broken, or asks for something not implemented.
        WeightError: a tensor is missing, misshaped, of another type or unexpected, or a shard is corrupt.
        ParallelPlanError: the plan does not fit the model or the group.
    """
    raise NotImplementedError
