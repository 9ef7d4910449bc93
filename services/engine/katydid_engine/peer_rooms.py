"""Memory that GPUs of one host write into: of a TP group, for few rows, for those of a split residual and for parts of
a chunk; and of the ranks that hold experts, for few rows."""

from __future__ import annotations

from pathlib import Path

import torch
from katydid_kernels.peer_reduce import PeerReducer, symmetric_peers
from katydid_runtime.errors import SettingsError

from katydid_engine.collectives import TorchCollectives
from katydid_engine.layers.part_copies import PartCopies
from katydid_engine.model_config import ModelConfig, read_model_config
from katydid_engine.models.rank_context import HALVED_FROM, dispatches
from katydid_engine.rank_groups import RankGroups
from katydid_engine.worker_config import WorkerConfig

__all__ = ["copies_of", "expert_peers_of", "peers_of"]

# A kernel that waits for another rank looks at its flag at most so often in a second.
_LOOKS_A_SECOND = 4_000_000
# Rows up to which a sum over a TP group goes by kernels that write into each other's GPUs.
_FEW_TOKENS = 128
# Rows of all ranks up to which they go to all that hold experts.
_FEW_TOKENS_OF_ALL = 256


def peers_of(config: WorkerConfig, groups: RankGroups, device: torch.device) -> PeerReducer | None:
    """Memory of the TP group's GPUs, for few rows or those of a split residual; None where all go by collectives."""
    plan = config.plan
    if device.type != "cuda" or plan.tp & (plan.tp - 1) or plan.tp == 1 or plan.pp > 1:
        return None
    assert isinstance(groups.tensor, TorchCollectives)
    assert groups.tensor.group is not None
    hidden = read_model_config(Path(config.folder)).hidden_size
    if hidden % 16:
        return None
    rows = -(-config.max_batch_tokens // plan.tp) * plan.tp
    sizes = {"few_tokens": _FEW_TOKENS, "tokens": rows if plan.sp else plan.tp}
    memory = symmetric_peers(groups.tensor.group, PeerReducer.nbytes(plan.tp, hidden, **sizes), device)
    return PeerReducer(memory, hidden, patience=_patience(config), **sizes)


def expert_peers_of(config: WorkerConfig, groups: RankGroups, device: torch.device) -> PeerReducer | None:
    """Memory of the GPUs that hold experts, where each has requests of its own; None where rows to experts go by
    messages alone."""
    plan, model = config.plan, read_model_config(Path(config.folder))
    one_host = config.rendezvous.startswith("file:")
    if device.type != "cuda" or config.dtype != "bfloat16" or not one_host or not dispatches(model, plan):
        return None
    if plan.tp > 1 or plan.redundant_experts or plan.ep & (plan.ep - 1) or model.hidden_size % 16:
        return None
    assert isinstance(groups.experts, TorchCollectives)
    assert groups.experts.group is not None
    sizes = {"few_tokens": _FEW_TOKENS_OF_ALL, "tokens": plan.ep}
    memory = symmetric_peers(groups.experts.group, PeerReducer.nbytes(plan.ep, model.hidden_size, **sizes), device)
    return PeerReducer(memory, model.hidden_size, patience=_patience(config), **sizes)


def _patience(config: WorkerConfig) -> int:
    """A kernel that gives a rank up goes on with what there is: by then the face must have ended the group."""
    return min(round(2 * config.rank_timeout_s * _LOOKS_A_SECOND), 2**31 - 1)


def copies_of(config: WorkerConfig, groups: RankGroups, device: torch.device) -> PartCopies | None:
    """Memory of the TP group's GPUs for chunks whose parts take turns; None where no chunk is cut so, or rows go by
    collectives."""
    plan, model = config.plan, read_model_config(Path(config.folder))
    halves = _halves(config, model)
    if device.type != "cuda" or not (halves and plan.fp8_transfers) or model.hidden_size % 16:
        return None
    assert isinstance(groups.tensor, TorchCollectives)
    assert groups.tensor.group is not None
    tokens = -(-config.max_batch_tokens // 2)
    # A rank tells of each row its experts and their weights, the shared one's among them.
    told = 0 if model.moe is None else 2 * (model.moe.top_k + 1)
    size = PartCopies.nbytes(plan.tp, model.hidden_size, tokens=tokens, told=told)
    memory = symmetric_peers(groups.tensor.group, size, device)
    return PartCopies(memory, model.hidden_size, tokens=tokens, told=told)


def _halves(config: WorkerConfig, model: ModelConfig) -> bool:
    """Whether long chunks are computed in two parts. Raises SettingsError where they are to be, and none is so long."""
    plan, parts = config.plan, config.micro_batches
    if not plan.sp or parts < 2 or dispatches(model, plan):
        return False
    if config.max_batch_tokens < HALVED_FROM:
        raise SettingsError(
            f"micro_batches={parts}: with plan={plan} only steps of {HALVED_FROM} tokens or more are computed in "
            f"parts, and max_batch_tokens is {config.max_batch_tokens}",
            field="micro_batches",
            value=parts,
            allowed=f"1, or 2 with max_batch_tokens of at least {HALVED_FROM}",
        )
    return True
