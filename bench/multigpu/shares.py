"""A rank's share of Hy3's layers at full width behind the engine's runner: prompts, and decode steps as graphs.

The weights are synthetic and quantised, the groups real: what `katydid bench slice` does for one rank alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from katydid_engine.layers.few_rows_exchange import FewRowPeers
from katydid_engine.layers.part_exchange import RowCopies
from katydid_engine.loader import build_model
from katydid_engine.model_config import ModelConfig
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.models.rank_context import HALVED_FROM, RankPeers
from katydid_engine.parallel import ParallelPlan
from katydid_engine.planning.known_models import KNOWN_MODELS
from katydid_engine.quantization import Scheme
from katydid_engine.rank_groups import RankGroups
from katydid_engine.rank_slice.skewed_routing import SkewedRouting
from katydid_engine.rank_slice.steps import SliceSteps
from katydid_engine.rank_slice.synthetic_weights import DEVIATION, SyntheticWeights

__all__ = ["Share", "build_share", "cut_hy3", "steps_of"]

# More than one DP group ever begins here.
SEQUENCES = 1 << 16


@dataclass(frozen=True, slots=True)
class Share:
    """What ``SliceSteps`` needs of a model and its TP group, the DP group's number ``group`` among others."""

    model: DecoderLM
    tensor: object
    group: int

    def token_ids(self, count: int, seed: int = 0) -> list[int]:
        """Other ones in every DP group: the same tokens would choose the same experts."""
        generator = torch.Generator().manual_seed(seed + 1000 * self.group)
        ids: list[int] = torch.randint(3, self.model.config.vocab_size, (count,), generator=generator).tolist()
        return ids


def cut_hy3(layers: int, *, mtp: bool = False, dry: bool = False) -> ModelConfig:
    """So many of its sparse layers; in a dry run two, as narrow as a test."""
    config = replace(
        KNOWN_MODELS["hy3"], num_layers=layers, sparse_layers=(True,) * layers, num_mtp_layers=1 if mtp else 0
    )
    if not dry:
        return config
    assert config.moe is not None
    moe = replace(config.moe, num_experts=16, intermediate_size=32, shared_intermediate_size=32)
    return replace(
        config, num_layers=2, sparse_layers=(True, True), hidden_size=128, vocab_size=512, head_dim=16, moe=moe
    )


def build_share(
    config: ModelConfig,
    plan: ParallelPlan,
    groups: RankGroups,
    device: torch.device,
    peers: RankPeers | None,
    *,
    micro_batches: int = 1,
    copies: RowCopies | None = None,
    halved_from: int = HALVED_FROM,
    skewed: bool = False,
    expert_peers: FewRowPeers | None = None,
) -> Share:
    """e4m3 weights and pages on a GPU; fp32 on a CPU. Experts are chosen evenly or, skewed, as a trained model does."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    assert config.moe is not None
    weights = SyntheticWeights(
        device,
        dtype,
        Scheme.FP8 if on_gpu else Scheme.NONE,
        pool=1 << 26 if on_gpu else 1 << 20,
        bias=SkewedRouting(config.moe.top_k, DEVIATION * config.hidden_size**0.5) if skewed else None,
    )
    model = build_model(
        replace(config, quantization=weights.quantization),
        weights,
        device=device,
        dtype=dtype,
        plan=plan,
        collectives=groups.tensor,
        experts=groups.experts,
        peers=peers,
        micro_batches=micro_batches,
        copies=copies,
        halved_from=halved_from,
        expert_peers=expert_peers,
        kv_cache_dtype="fp8" if on_gpu else "auto",
    )
    return Share(model, groups.tensor, plan.place(dist.get_rank()).dp if dist.is_initialized() else 0)


def steps_of(share: Share, tokens: int, drafts: int = 0, *, ahead: bool = True) -> SliceSteps:
    steps = SliceSteps(share, tokens, drafts=drafts, ahead=ahead)  # type: ignore[arg-type]
    # A sequence's number is the seed of its samples.
    for _ in range(SEQUENCES * share.group):
        steps.next_sequence()
    return steps
