"""Candidates of plans for a model on a pool, what is predicted of each, and which one serves a target best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from katydid_runtime.errors import SettingsError

from katydid_engine.model_config import ModelConfig
from katydid_engine.parallel import ParallelPlan, Role
from katydid_engine.planning.measured import Measured
from katydid_engine.planning.memory import RankMemory, rank_memory
from katydid_engine.planning.phases import Phases
from katydid_engine.planning.pool import Pool

__all__ = ["Choice", "Prediction", "Target", "candidates", "choose", "predict"]

_COPIES = 32


@dataclass(frozen=True, slots=True)
class Target:
    """Tokens of context, and seconds: to the first token of such a prompt, and a token of its answer."""

    context: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one plan.

    Attributes:
        requests: of the target's context that decode at once on all ranks within its TPOT; 0 where none fits.
        tpot_s: of a step with so many.
        micro_batches: that such a step is best cut into.
        tokens_per_gpu_s: decoded.
        reason: why the plan cannot serve; empty where it can.
    """

    plan: ParallelPlan
    memory: RankMemory
    ttft_s: float
    ttft_sending_s: float
    requests: int
    tpot_s: float
    tokens_per_gpu_s: float
    reason: str = ""
    micro_batches: int = 1

    @property
    def prompt_tokens_per_gpu_s(self) -> float:
        return 0.0 if not self.ttft_s else 1 / (self.ttft_s * self.plan.world_size)


@dataclass(frozen=True, slots=True)
class Choice:
    """Attributes:
    prefill, decode: for each phase alone.
    both: the one to take where one plan has to serve both; None where no plan meets both targets.
    why: in words.
    """

    prefill: Prediction | None
    decode: Prediction | None
    both: Prediction | None
    why: tuple[str, ...]


def candidates(config: ModelConfig, pool: Pool) -> Iterator[ParallelPlan]:
    """Plans over 1, 2, 4 ... GPUs of the pool that cut the model evenly."""
    experts = config.moe.num_experts if config.moe is not None else 0
    gpus = 1
    while gpus <= pool.max_gpus:
        if gpus >= pool.min_gpus:
            for plan in _over(gpus, experts, pool.gpus_per_host):
                try:
                    plan.check_model(
                        num_heads=config.num_heads,
                        num_kv_heads=config.num_kv_heads,
                        num_experts=experts,
                        num_layers=config.num_layers,
                    )
                except SettingsError:
                    continue
                yield plan
        gpus *= 2


def _over(gpus: int, experts: int, host: int) -> Iterator[ParallelPlan]:
    if gpus == 1:
        yield ParallelPlan()
        return
    if gpus <= host:
        yield ParallelPlan(tp=gpus)
        yield ParallelPlan(tp=gpus, sp=True, fp8_transfers=True)
        if experts:
            yield ParallelPlan(tp=gpus, sp=True, ep=gpus, fp8_transfers=True)
    if experts:
        yield ParallelPlan(dp=gpus, ep=gpus)
        if not _COPIES % gpus:
            yield ParallelPlan(dp=gpus, ep=gpus, redundant_experts=_COPIES)


def predict(config: ModelConfig, plan: ParallelPlan, pool: Pool, speeds: Measured, target: Target) -> Prediction:
    """What a plan would do; nothing of it is measured as a whole."""
    if pool.network_bytes_per_s is not None:
        figures = {**speeds.figures, "network_bytes_per_s": pool.network_bytes_per_s}
        speeds = replace(speeds, figures=figures)
    available = pool.memory_bytes or speeds.memory_bytes
    memory = rank_memory(config, plan, memory_bytes=min(available, speeds.memory_bytes))
    phases = Phases(config, plan, speeds)
    if plan.ep == 1 and config.moe is not None and plan.tp not in speeds.sliced_experts:
        return Prediction(plan, memory, 0, 0, 0, 0, 0, f"no speed of experts cut over {plan.tp} ranks")
    if memory.tokens < target.context:
        held = max(0, memory.tokens)
        return Prediction(plan, memory, 0, 0, 0, 0, 0, f"its pages hold {held:,} tokens of a group's requests")
    prefill = phases.prefill(target.context)
    most = memory.group_requests(target.context)
    # The most that step in time; a step grows with its requests.
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if phases.decode(middle, target.context).total <= target.tpot_s:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        alone = phases.decode(1, target.context).total
        return Prediction(
            plan,
            memory,
            prefill.total,
            prefill.exposed,
            0,
            alone,
            0,
            f"a step of one request takes {alone * 1e3:.1f} ms",
        )
    step = phases.decode(low, target.context)
    rate = low * plan.dp / step.total / plan.world_size
    return Prediction(
        plan,
        memory,
        prefill.total,
        prefill.exposed,
        low * plan.dp,
        step.total,
        rate,
        micro_batches=step.micro_batches,
    )


def choose(predictions: list[Prediction], target: Target) -> Choice:
    """For prompts the plan that computes most of them for its GPUs within the TTFT, for answers the one that decodes
    most within the TPOT."""
    served = [one for one in predictions if one.ttft_s and not one.reason]
    in_time = [one for one in served if one.ttft_s <= target.ttft_s]
    prefill = max(in_time, key=lambda one: one.prompt_tokens_per_gpu_s, default=None)
    decode = max(served, key=lambda one: one.tokens_per_gpu_s, default=None)
    both = max(in_time, key=lambda one: one.tokens_per_gpu_s, default=None)
    why = []
    if prefill is None:
        fastest = min(served, key=lambda one: one.ttft_s, default=None)
        told = (
            "no plan holds such a prompt"
            if fastest is None
            else f"the fastest, {fastest.plan}, takes {fastest.ttft_s:.2f} s"
        )
        why.append(f"prompts: none meets {target.ttft_s} s; {told}")
    else:
        why.append(
            f"prompts: {prefill.plan} computes most for its GPUs within {target.ttft_s} s "
            f"({target.context * prefill.prompt_tokens_per_gpu_s:,.0f} tokens a GPU-second)"
        )
    if decode is None:
        why.append(f"answers: none steps within {target.tpot_s * 1e3:.0f} ms")
    else:
        why.append(
            f"answers: {decode.plan} decodes most within {target.tpot_s * 1e3:.0f} ms "
            f"({decode.tokens_per_gpu_s:,.0f} tokens a GPU-second, {decode.requests} requests)"
        )
    if prefill is not None and decode is not None and both is not None:
        gain = decode.tokens_per_gpu_s / both.tokens_per_gpu_s - 1
        why.append(f"one plan for both: {both.plan}; engines of a role each decode {gain:+.0%} against it")
    return Choice(_as(prefill, Role.PREFILL), _as(decode, Role.DECODE), both, tuple(why))


def _as(prediction: Prediction | None, role: Role) -> Prediction | None:
    return None if prediction is None else replace(prediction, plan=replace(prediction.plan, role=role))
