"""What the face knows of a model from its folder and the settings, without loading it: shape, identity, digests."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass

from katydid_cache import BlockLayout
from katydid_runtime.golden_prompts import tokenised_alone
from katydid_runtime.tokenizer_digest import tokenizer_digest

from katydid_engine.identity import model_identity
from katydid_engine.model_config import ModelConfig, read_model_config
from katydid_engine.quantization import Scheme, kv_dtype, scheme_to_apply
from katydid_engine.settings import EngineSettings

__all__ = ["ModelFacts", "read_model_facts"]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the face knows of the model without loading it."""

    config: ModelConfig
    dtype: str
    identity: bytes
    dense_identity: bytes
    layout: BlockLayout
    tokenizer_digest: bytes
    golden_digest: bytes


async def read_model_facts(settings: EngineSettings) -> ModelFacts:
    """Raises ModelFolderError, or SettingsError for a quantisation that does not fit the model's own."""
    config = read_model_config(settings.model)
    dtype: str = settings.dtype
    if dtype == "auto":
        dtype = "float32" if settings.device == "cpu" else config.checkpoint_dtype
    pages = kv_dtype(settings.kv_cache_dtype, config.quantization, dtype)
    scheme = scheme_to_apply(settings.quantization, config.quantization)
    # What the checkpoint itself says of its quantisation is part of config.json.
    compute = dtype if scheme is Scheme.NONE else f"{dtype} {scheme.value}"
    if settings.parallel_plan.fp8_transfers:
        compute += " fp8 transfers"
    identity_of = functools.partial(model_identity, settings.model, kv_dtype=pages)
    identity, dense_identity = await asyncio.to_thread(identity_of, compute_dtype=compute), b""
    if settings.sparse_prefill is not None:
        compute += f" {settings.sparse_prefill}"
        dense_identity, identity = identity, await asyncio.to_thread(identity_of, compute_dtype=compute)
    settings.parallel_plan.check_model(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        num_experts=config.moe.num_experts if config.moe else 0,
        num_layers=config.num_layers,
    )
    layout = BlockLayout(
        layers=config.num_layers + config.num_mtp_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=pages,
    )
    digest = golden = b""
    if (settings.model / "tokenizer.json").exists():
        digest = tokenizer_digest(settings.model)
        golden = await asyncio.to_thread(tokenised_alone, settings.model)
    return ModelFacts(config, dtype, identity, dense_identity, layout, digest, golden)
