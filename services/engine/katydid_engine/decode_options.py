"""What a rank does to decode faster, from the settings and from what its model and its plan allow."""

from __future__ import annotations

from katydid_kernels.fused_moe import moe_waits
from katydid_runtime.errors import SettingsError

from katydid_engine.draft_depth import MAX_DRAFTS, DraftDepth
from katydid_engine.drafting import DraftModel
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.worker_config import WorkerConfig

__all__ = ["captures", "draft_depth", "plans_ahead"]


def draft_depth(config: WorkerConfig, model: DecoderLM) -> DraftDepth | None:
    """None where nothing is drafted. Raises SettingsError where drafts are wanted of a model that makes none."""
    can = isinstance(model, DraftModel) and model.config.num_mtp_layers > 0 and config.plan.pp == 1
    if config.mtp == "0" or (config.mtp == "auto" and not can):
        return None
    if not can:
        raise SettingsError(
            "this model has no draft layer, or lies on several pipeline stages",
            field="mtp",
            value=config.mtp,
            allowed="auto or 0",
        )
    if config.mtp == "auto":
        return DraftDepth(MAX_DRAFTS, automatic=True)
    return DraftDepth(int(config.mtp))


def plans_ahead(config: WorkerConfig) -> bool:
    """Raises SettingsError where pipeline stages are to plan ahead."""
    can = config.plan.pp == 1
    if config.async_scheduling == "on" and not can:
        raise SettingsError(
            "pipeline stages plan no step ahead", field="async_scheduling", value="on", allowed="auto or off"
        )
    if config.async_scheduling == "auto":
        return can and config.device.startswith("cuda")
    return config.async_scheduling == "on"


def captures(config: WorkerConfig, model: DecoderLM) -> bool:
    """Whether steps of decodes become CUDA graphs: where none waits for the host. Ranks wait for each other on their
    devices; with rows at experts of other ranks, in a form that they agree on before."""
    plan = config.plan
    if config.cuda_graphs == "off" or model.device.type != "cuda" or plan.pp > 1:
        return False
    if model.dispatched and plan.tp > 1:
        return False
    moe = model.config.moe
    if moe is None:
        return True
    width = moe.intermediate_size // (plan.tp if plan.ep == 1 else 1)
    return not moe_waits(model.dtype, model.config.hidden_size, width, model.device)
