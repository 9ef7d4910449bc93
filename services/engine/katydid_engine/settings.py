"""What an engine can be told; `python -m katydid_engine --help` lists it."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal, Self

from katydid_runtime.errors import SettingsError
from katydid_runtime.fault_delays import delays_at
from katydid_runtime.settings import DialingSettings
from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from katydid_engine.faults import FaultDelays
from katydid_engine.parallel import ParallelPlan, Role
from katydid_engine.sparse_prefill import SparsePrefill

__all__ = ["EngineSettings"]

_PHASES = tuple(field.name for field in dataclasses.fields(FaultDelays))


def _whole_form(option: str | None) -> str | None:
    return option if option is None else str(SparsePrefill.parse(option))


class EngineSettings(DialingSettings):
    """Settings of one engine: a face and a worker for each rank of its plan."""

    model_config = SettingsConfigDict(env_prefix="KATYDID_ENGINE_")

    model: Path = Field(description="folder of the model: config.json, safetensors, tokenizer.json")
    model_name: str | None = Field(None, description="name that requests ask for; by default the folder's name")
    role: Literal["both", "prefill", "decode"] = Field(
        "both", description="what gateways should send here: whole requests, prompts to compute, or answers to continue"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of what is not quantised; auto: float32 on the CPU, the checkpoint's on a GPU"
    )
    quantization: Literal["auto", "fp8", "w4a8"] = Field(
        "auto", description="of linear and expert weights; auto: as stored; else what a plain checkpoint's become"
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="of KV pages; auto: dtype, or fp8 (e4m3) where the checkpoint was calibrated for it"
    )
    sparse_prefill: Annotated[str | None, BeforeValidator(_whole_form)] = Field(
        None,
        description="long prompts of requests that allow it attend to a part of their blocks, as in "
        "stem:budget=0.25,dense_layers=2,min_tokens=32768",
    )
    plan: str = Field(
        "single",
        description="how the model is cut over ranks: tpN, sp, dpN, epN, epN+REDUNDANT, ppN, fp8, as in tp8,sp,ep8 or "
        "dp8,ep8+32; single: one rank",
    )
    nodes: int = Field(1, ge=1, le=64, description="engines, one a host, that carry out the plan together")
    node_rank: int = Field(0, ge=0, description="which of them this is")
    rendezvous: str | None = Field(None, description="host:port of node 0, where the ranks of all nodes meet")
    rank_timeout_s: float = Field(
        10.0, gt=0, description="how long a rank waits for another before the engine has failed"
    )
    rebalance_passes: int = Field(
        2000, ge=1, description="passes of the model between rebalancings of experts, in a plan with redundant ones"
    )
    micro_batches: int = Field(
        1,
        ge=1,
        le=8,
        description="parts of a step that overlap where ranks wait for each other's rows (ep, pp; sp: 2, in steps of "
        "8192 tokens or more)",
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads a worker; by default all cores but one, shared evenly"
    )
    kv_pages: int | None = Field(None, ge=1, description="KV pages of 64 tokens a rank; by default what memory allows")
    kv_memory_mib: int = Field(
        2048, ge=1, description="memory for a rank's KV pages on the CPU, unless kv_pages is set"
    )
    gpu_memory_share: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory for weights and KV pages")
    max_model_tokens: int = Field(262_144, ge=2, description="longest prompt plus output; the model may allow less")
    max_batch_tokens: int | None = Field(None, ge=1, description="tokens in a step; default 512 on the CPU, else 8192")
    max_sequences: int | None = Field(None, ge=1, description="sequences in a step; default 64 on the CPU, else 256")
    max_requests: int = Field(4096, ge=1, description="requests in an engine beyond which it refuses more")
    max_logprobs: int = Field(20, ge=0, description="largest number of top log probabilities a request may ask for")
    vllm_protocol: bool = Field(
        False, description="also serve vllm.grpc.engine.VllmEngine, for other gateways (extra vllm-protocol)"
    )
    mtp: Literal["auto", "0", "1", "2", "3"] = Field(
        "auto", description="tokens drafted behind every sampled one; auto: what brings most, 0 without a draft layer"
    )
    async_scheduling: Literal["auto", "on", "off"] = Field(
        "auto", description="plan a step while the one before runs; auto: on a GPU, but for pipeline stages"
    )
    cuda_graphs: Literal["on", "off"] = Field(
        "on", description="on a GPU, capture steps of decodes at the start; off: launch them op by op"
    )
    tpot_target_ms: float | None = Field(
        None,
        gt=0,
        description="time between a request's tokens that others' prompts leave it; by default 50 on a GPU, else any",
    )
    ttft_target_ms: float | None = Field(
        None,
        gt=0,
        description="time to a request's first token: prompts are ordered so that as many as can keep it; "
        "by default 4000 on a GPU, else none",
    )
    warm_grammars: bool = Field(
        True, description="start what checks grammars with the engine, or with the first request that has one"
    )
    grammar_timeout_s: float = Field(
        5.0, gt=0, description="time a request's grammar may take to compile, or it is refused"
    )
    grammar_memory_mib: int = Field(
        1024, ge=64, description="memory a request's grammar may take to compile, or it is refused"
    )
    reattach_window_s: float = Field(5.0, ge=0, description="how long requests outlive a lost session stream")
    stall_timeout_s: float = Field(10.0, gt=0, description="silence of a step loop after which health is NOT_SERVING")
    kvcache_address: str | None = Field(
        None,
        description="KV-cache service of this host, host:port or unix:/path; or several: HOST:PORT,..., "
        "dns:NAME:PORT or file:PATH",
    )
    kvcache_instances: str | None = Field(
        None,
        description="all instances, in the same form, when kvcache_address is this host's own: it pulls from them",
    )
    kvcache_lanes: int = Field(2, ge=0, le=64, description="bulk lanes of a read, to services that have them")
    kvcache_fetch: Literal["cheaper", "always"] = Field(
        "cheaper", description="fetch found blocks when that is cheaper than computing them, or always"
    )
    vllm_metric_names: bool = Field(False, description="show figures under vLLM's names (vllm:...) as well")
    staging_mib: int = Field(128, ge=1, description="shared memory of a rank for blocks on their way to and from it")
    profile_folder: Path = Field(Path(tempfile.gettempdir()), description="where AdminService.Profile writes its files")
    fault_delays: Annotated[dict[str, float], NoDecode, BeforeValidator(delays_at(*_PHASES))] = Field(
        {}, description=f"for tests: delays, point:milliseconds,... at {', '.join(_PHASES)}"
    )

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        if self.batch_tokens < self.sequences:
            raise ValueError(
                f"max_batch_tokens is {self.batch_tokens}, below max_sequences={self.sequences} that a step may decode"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _take_from_launcher(cls, given: dict[str, object]) -> dict[str, object]:
        """What torchrun, and launchers that speak its language, say of the nodes; options win."""
        environment = os.environ
        nodes = environment.get("NNODES") or environment.get("GROUP_WORLD_SIZE")
        if nodes is None or nodes == "1":
            return given
        told = {"nodes": nodes, "node_rank": environment.get("NODE_RANK") or environment.get("GROUP_RANK", "0")}
        if address := environment.get("MASTER_ADDR"):
            port = environment.get("MASTER_PORT", "29500")
            if not port.isdecimal():
                raise ValueError(f"MASTER_PORT={port}: expected the number of a port")
            # torchrun keeps a store of its own on that port.
            told["rendezvous"] = f"{address}:{int(port) + ('TORCHELASTIC_RUN_ID' in environment)}"
        return told | given

    @field_validator("plan")
    @classmethod
    def _check_plan(cls, text: str) -> str:
        try:
            return str(ParallelPlan.parse(text))
        except SettingsError as error:
            raise ValueError(error.message) from None

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        plan = self.parallel_plan
        if self.nodes > 1 and (not plan.shares_experts or plan.dp % self.nodes):
            raise ValueError(f"nodes={self.nodes}: expected a divisor of dp in a plan with ep=tp*dp, got plan={plan}")
        if self.nodes > 1 and self.rendezvous is None:
            raise ValueError(f"rendezvous is missing: nodes={self.nodes} have to meet at host:port")
        if self.node_rank >= self.nodes:
            raise ValueError(f"node_rank={self.node_rank}: expected below nodes={self.nodes}")
        if plan.pp > 1 and self.kvcache_address is not None:
            raise ValueError(f"kvcache_address: a pipeline (plan={plan}) keeps its blocks in its own pages alone")
        return self

    @property
    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan.parse(self.plan, Role(self.role))

    @property
    def dp_ranks(self) -> int:
        """DP groups of this engine."""
        return self.parallel_plan.dp // self.nodes

    @property
    def name(self) -> str:
        return self.model_name or self.model.resolve().name

    @property
    def faults(self) -> FaultDelays:
        return FaultDelays(**self.fault_delays)

    @property
    def batch_tokens(self) -> int:
        return self.max_batch_tokens or (512 if self.device == "cpu" else 8192)

    @property
    def sequences(self) -> int:
        return self.max_sequences or min(64 if self.device == "cpu" else 256, self.batch_tokens)

    @property
    def tpot_target_s(self) -> float | None:
        if self.tpot_target_ms is None:
            return None if self.device == "cpu" else 0.05
        return self.tpot_target_ms / 1000

    @property
    def ttft_target_s(self) -> float | None:
        if self.ttft_target_ms is None:
            return None if self.device == "cpu" else 4.0
        return self.ttft_target_ms / 1000

    @property
    def worker_threads(self) -> int:
        # One core is left to the face, the gateway and the cache service: a worker that has to wait for a thread of its
        # own that lost its core is slower than one with a thread less.
        return self.threads or max(1, ((os.cpu_count() or 1) - 1) * self.nodes // self.parallel_plan.world_size)
