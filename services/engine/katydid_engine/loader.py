"""From a model folder to a model on this rank: config, plan and tensors are checked before anything runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from katydid_runtime.errors import ModelFolderError, SettingsError

from katydid_engine.checkpoint import Checkpoint
from katydid_engine.collectives import Collectives, SingleRank
from katydid_engine.layers.few_rows_exchange import FewRowPeers
from katydid_engine.layers.part_exchange import RowCopies
from katydid_engine.model_config import ModelConfig, read_model_config
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.models.dense import build_dense
from katydid_engine.models.hy_v3 import build_hy_v3, count_mtp_layers
from katydid_engine.models.pipeline import Stage
from katydid_engine.models.qwen3_moe import build_qwen3_moe
from katydid_engine.models.rank_context import HALVED_FROM, RankContext, RankPeers
from katydid_engine.parallel import ParallelPlan
from katydid_engine.quantization import Scheme, kv_dtype, scheme_to_apply
from katydid_engine.weights import TensorSource, Weights

__all__ = ["build_model", "load_model"]

_BUILDERS: dict[str, Callable[[RankContext, Weights], DecoderLM]] = {
    "hy_v3": build_hy_v3,
    "llama": build_dense,
    "qwen3": build_dense,
    "qwen3_moe": build_qwen3_moe,
}

# Tensors that checkpoints carry and no model needs: recomputable tables, and the draft layers' copies of the
# embedding and the head.
_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|^model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight$"
    r"|\.self_attn\.q\.scale$"  # q is quantised by a scale for each token and head instead
)
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def load_model(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    plan: ParallelPlan | None = None,
    collectives: Collectives | None = None,
    experts: Collectives | None = None,
    stage: Stage | None = None,
    micro_batches: int = 1,
    peers: RankPeers | None = None,
    copies: RowCopies | None = None,
    halved_from: int = HALVED_FROM,
    expert_peers: FewRowPeers | None = None,
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
) -> DecoderLM:
    """Loads this rank's share of a Hugging Face model folder.

    Args:
        folder: holds ``config.json`` and safetensors shards.
        device: where weights and pages live.
        dtype: of activations and plain weights; by default fp32 on CPU (the reference path), else the checkpoint's.
        plan: how the model is cut; by default one rank holds all of it.
        collectives: the TP group; its ``size`` must equal ``plan.tp``. By default a group of one.
        experts: the ranks that hold whole experts between them, ``plan.ep`` of them; by default the TP group.
        stage: this rank's pipeline stage, of ``plan.pp``; by default the only one.
        micro_batches: into how many parts a step is cut where ranks wait for each other.
        peers: sums few rows in a plan without sp, or sends rows of a split residual in one with sp and fp8, where all
            ranks are GPUs of one host.
        copies: likewise sends rows of a part of a chunk while another part is computed, with micro-batches.
        halved_from: tokens of a pass from which those of a split residual are computed in two parts.
        expert_peers: brings few bf16 rows to all ranks that hold experts, likewise.
        quantization: "auto" takes linear weights as they are stored; "fp8" and "w4a8" quantise plain ones.
        kv_cache_dtype: "auto" for pages of ``dtype``, or fp8 where the checkpoint was calibrated for it; "fp8".

    Raises:
        ModelFolderError: the config is absent, broken or asks for something not implemented; a tensor is missing,
            misshaped, of another type or unexpected; a shard is corrupt. Names tensor, found and expected.
        SettingsError: the plan does not fit the model or the group; the checkpoint is quantised otherwise than asked.
    """
    config = read_model_config(folder)
    device = torch.device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else getattr(torch, config.checkpoint_dtype)
    checkpoint = Checkpoint(folder)
    try:
        model = build_model(
            config,
            checkpoint,
            device=device,
            dtype=dtype,
            plan=plan,
            collectives=collectives,
            experts=experts,
            stage=stage,
            micro_batches=micro_batches,
            peers=peers,
            copies=copies,
            halved_from=halved_from,
            expert_peers=expert_peers,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
        )
    finally:
        checkpoint.close()
    unexpected = [name for name in checkpoint.unused() if not _ignored(name, config, stage or Stage())]
    if unexpected:
        names = ", ".join(unexpected[:5]) + (f" and {len(unexpected) - 5} more" if len(unexpected) > 5 else "")
        raise ModelFolderError(
            f"{folder}: {len(unexpected)} unexpected tensors for model_type {config.architecture}: {names}",
            field=unexpected[0],
            value=list(checkpoint.entries[unexpected[0]].shape),
            allowed=f"the tensors of {config.architecture}",
        )
    return model


def build_model(
    config: ModelConfig,
    source: TensorSource,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    plan: ParallelPlan | None = None,
    collectives: Collectives | None = None,
    experts: Collectives | None = None,
    stage: Stage | None = None,
    micro_batches: int = 1,
    peers: RankPeers | None = None,
    copies: RowCopies | None = None,
    halved_from: int = HALVED_FROM,
    expert_peers: FewRowPeers | None = None,
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
) -> DecoderLM:
    """Builds this rank's share from any source of tensors (``RandomSource`` needs no checkpoint).

    Raises:
        ModelFolderError: a tensor of the source is missing, misshaped or of another type.
        SettingsError: the plan does not fit the model or the group; the source is quantised otherwise than asked, or
            computes in another dtype than bf16 on a GPU.
    """
    plan = plan or ParallelPlan()
    collectives = collectives or SingleRank()
    experts = experts or (collectives if plan.ep == plan.tp else SingleRank())
    stage = stage or Stage()
    _check_plan(plan, config)
    for name, wanted, found in (("tp", plan.tp, collectives.size), ("ep", plan.ep, experts.size)):
        if found != wanted:
            raise SettingsError(
                f"parallel plan: {name}={wanted}, but the group has {found} ranks",
                field=name,
                value=wanted,
                allowed=str(found),
            )
    if stage.count != plan.pp:
        raise SettingsError(
            f"parallel plan: pp={plan.pp}, but there are {stage.count} stages",
            field="pp",
            value=plan.pp,
            allowed=str(stage.count),
        )
    stored, device = config.quantization, torch.device(device)
    scheme = scheme_to_apply(quantization, stored)
    pages = getattr(torch, kv_dtype(kv_cache_dtype, stored, str(dtype).removeprefix("torch.")))
    if device.type == "cuda" and dtype != torch.bfloat16 and (scheme, stored.scheme) != (Scheme.NONE, Scheme.NONE):
        raise SettingsError(
            f"dtype is {dtype}, but quantised weights are computed in bfloat16 on a GPU",
            field="dtype",
            value=str(dtype),
            allowed="bfloat16",
        )
    weights = Weights(source, device, dtype, collectives.rank, collectives.size, quantization=stored, scheme=scheme)
    if config.architecture == "hy_v3":
        config = replace(
            config, num_mtp_layers=max(config.num_mtp_layers, count_mtp_layers(weights, config.num_layers))
        )
    context = RankContext(
        config,
        plan,
        collectives,
        experts,
        stage,
        pages,
        micro_batches,
        peers=peers,
        copies=copies,
        halved_from=halved_from,
        expert_peers=expert_peers,
    )
    return _BUILDERS[config.architecture](context, weights)


def _check_plan(plan: ParallelPlan, config: ModelConfig) -> None:
    plan.check_model(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        num_experts=config.moe.num_experts if config.moe else 0,
        num_layers=config.num_layers,
    )
    widths = {"intermediate_size": config.intermediate_size}
    if config.moe is not None:
        if plan.ep == 1:
            widths["moe_intermediate_size"] = config.moe.intermediate_size
        if not plan.dispatches:
            widths["shared expert width"] = config.moe.shared_intermediate_size
    for name, width in widths.items():
        if width % plan.tp:
            raise SettingsError(
                f"parallel plan: tp={plan.tp}, expected a divisor of {name}={width}",
                field="tp",
                value=plan.tp,
                allowed=f"a divisor of {name}={width}",
            )


def _ignored(name: str, config: ModelConfig, stage: Stage) -> bool:
    if _IGNORED.search(name) or (config.tie_embeddings and name == "lm_head.weight"):
        return True
    layer = _LAYER.match(name)
    if layer is None:
        return not (stage.first and stage.last)
    index = int(layer[1])
    return index not in stage.layers(config.num_layers) and (index < config.num_layers or not stage.first)
