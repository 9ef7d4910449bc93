"""What the face tells a worker process at its start; the first message on its channel."""

from __future__ import annotations

from dataclasses import dataclass

from katydid_engine.faults import FaultDelays
from katydid_engine.parallel import ParallelPlan
from katydid_engine.staging import StagingShape

__all__ = ["RingEnds", "WorkerConfig"]


@dataclass(frozen=True, slots=True)
class RingEnds:
    """Descriptors of a group's plan ring: its memory, and one eventfd for each rank but the first."""

    memory: int
    bells: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One rank of one group.

    Attributes:
        started_at: when the face began to start this process, of the host's monotonic clock.
        folder: of the model.
        device: "cpu" or "cuda:3".
        dtype: name of a torch dtype; of activations and of weights that are not quantised.
        quantization, kv_cache_dtype: as in the settings.
        plan: of all ranks that compute together.
        rank: this one among them.
        member, members: this rank in its group of tp * pp ranks, and their number; the first schedules.
        dp_rank: the group among this engine's.
        rendezvous: how the plan's ranks find each other, as ``torch.distributed`` takes it ("file:///tmp/x").
        rank_timeout_s: how long a rank waits for another before its group has failed.
        micro_batches, rebalance_passes: as in the settings.
        mtp, async_scheduling, cuda_graphs: as in the settings.
        tpot_target_s: longest time between a row's tokens that is left to it beside prompts; None for any.
        ttft_target_s: longest time to a request's first token that prompts are ordered for; None for none.
        num_pages: KV pages; None takes ``kv_memory_bytes``, or on a GPU ``gpu_memory_share`` of what is free.
        max_model_tokens: longest prompt plus output wanted; the model or the pages may allow less.
        ring: None when the group has one member.
        sparse_prefill: as in the settings, in its whole form; None for dense prompts.
        staging, staging_memory: shape and descriptor of the buffer shared with the face; None without a cache service.
    """

    started_at: float
    folder: str
    device: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    plan: ParallelPlan
    rank: int
    member: int
    members: int
    dp_rank: int
    rendezvous: str
    rank_timeout_s: float
    micro_batches: int
    rebalance_passes: int
    threads: int
    mtp: str
    async_scheduling: str
    cuda_graphs: str
    tpot_target_s: float | None
    ttft_target_s: float | None
    num_pages: int | None
    kv_memory_bytes: int
    gpu_memory_share: float
    max_model_tokens: int
    max_batch_tokens: int
    max_sequences: int
    log_level: str
    faults: FaultDelays
    ring: RingEnds | None = None
    staging: StagingShape | None = None
    staging_memory: int | None = None
    sparse_prefill: str | None = None
