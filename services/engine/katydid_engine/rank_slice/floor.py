"""The least time that a step of a rank can take: bytes that must be read and FLOP that must be done, phase by phase.

Phases follow each other, so each is bound by the slower of the two and the bounds add up. Transfers are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from katydid_engine.model_config import ModelConfig
from katydid_engine.parallel import ParallelPlan

__all__ = ["Ceilings", "Work", "floor_s", "step_work"]

_ROUTER_BYTES = 4
_ROUTER_PRODUCTS = 3  # fp32 weights as bf16 parts
# What a weight takes: W4A8 has a bf16 scale for every 128.
_WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "w4a8": 0.5 + 2 / 128}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What one H200 was seen to do at best: reading, bytes/s, and products, FLOP/s."""

    read: float = 4.33e12
    fp8: float = 1.372e15
    bf16: float = 7.54e14


@dataclass(frozen=True, slots=True)
class Work:
    """Of one phase over all layers: ``moved`` bytes, ``flop`` at the speed of ``fp8`` or bf16."""

    phase: str
    moved: float
    flop: float
    fp8: bool = True

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.moved / ceilings.read, self.flop / (ceilings.fp8 if self.fp8 else ceilings.bf16))


def floor_s(work: list[Work], ceilings: Ceilings = Ceilings()) -> float:
    return sum(part.seconds(ceilings) for part in work)


def step_work(
    config: ModelConfig,
    plan: ParallelPlan,
    *,
    dtype: str,
    kv: str,
    tokens: int,
    pairs: float,
    context_tokens: float,
    sampled: int,
) -> list[Work]:
    """Of a step of one DP group, on one of its ranks.

    Args:
        dtype: of weights; activations are bf16 with bf16 weights, else e4m3.
        kv: of pages, "bf16" or "fp8".
        tokens: computed.
        pairs: of a query and a key that it attends to, over all tokens.
        context_tokens: whose K and V are read, over all sequences.
        sampled: rows of logits.
    """
    layers, hidden = config.num_layers, config.hidden_size
    weight, quantised = _WEIGHT_BYTES[dtype], dtype != "bf16"
    row = 1 if quantised else 2
    kv_bytes = 1 if kv == "fp8" else 2
    own = tokens / plan.tp if plan.sp else tokens
    q = config.num_heads // plan.tp * config.head_dim
    kv_width = plan.kv_heads(config.num_kv_heads) * config.head_dim
    qkv = q + 2 * kv_width
    sparse = sum(config.sparse_layers) if config.moe is not None else 0

    def product(phase: str, rows: float, inputs: int, outputs: int, count: int) -> Work:
        moved = inputs * outputs * weight + rows * (inputs * row + outputs * 2)
        return Work(phase, count * moved, count * 2 * rows * inputs * outputs, quantised)

    # Two norms a layer: two rows in, the residual out and a row for the product behind it.
    norms = Work("norms", layers * 2 * own * hidden * (6 + row), 0.0)
    # q in the pages' dtype; K and V go into pages.
    qkv_post = Work("qkv post", layers * tokens * (2 * qkv + kv_bytes * qkv), 0.0)
    attention = Work(
        "attention",
        layers * (context_tokens * 2 * kv_width * kv_bytes + tokens * q * (kv_bytes + 2)),
        layers * 4 * q * pairs,
        kv == "fp8",
    )
    head_rows = config.vocab_size / plan.tp
    head_weight = 4 if config.lm_head_fp32 else 2
    head = Work(
        "lm head",
        head_rows * hidden * head_weight + sampled * head_rows * 4,
        2 * sampled * head_rows * hidden * (_ROUTER_PRODUCTS if config.lm_head_fp32 else 1),
        False,
    )
    work = [
        norms,
        product("qkv", tokens, hidden, qkv, layers),
        qkv_post,
        attention,
        product("output projection", tokens, q, hidden, layers),
        head,
    ]
    if layers > sparse:
        width = config.intermediate_size // plan.tp
        dense = layers - sparse
        work.append(product("dense layers", tokens, hidden, 2 * width, dense))
        work.append(product("dense layers", tokens, width, hidden, dense))
    if config.moe is None:
        return work
    moe = config.moe
    work.append(
        Work(
            "router",
            sparse * (moe.num_experts * hidden * _ROUTER_BYTES + own * hidden * 2),
            sparse * 2 * own * hidden * moe.num_experts * _ROUTER_PRODUCTS,
            False,
        )
    )
    if moe.shared_intermediate_size:
        mine = tokens / plan.tp if plan.dispatches else tokens
        width = moe.shared_intermediate_size // (1 if plan.dispatches else plan.tp)
        work.append(product("shared expert", mine, hidden, 2 * width, sparse))
        work.append(product("shared expert", mine, width, hidden, sparse))
    everyone = tokens * (plan.dp if plan.shares_experts else 1)
    held = (moe.num_experts + plan.redundant_experts) / plan.ep
    width = moe.intermediate_size // (plan.tp if plan.ep == 1 else 1)
    hit = held * (1 - (1 - moe.top_k / moe.num_experts) ** everyone)
    rows = everyone * moe.top_k / plan.ep
    # Each token's row is read once and its sum written once, if experts' kernels gather and combine for themselves.
    arriving = min(everyone, rows)
    experts = Work(
        "experts",
        sparse * (hit * 3 * hidden * width * weight + arriving * hidden * (row + 2)),
        sparse * 6 * rows * hidden * width,
        quantised,
    )
    work.append(experts)
    return work
