"""The training form of hy3-tiny: Hy3's forward pass, written so that a narrow MoE trains at the speed of a dense one.

Sixteen experts of 64 columns are far below the tile of any grouped GEMM. All experts (and the shared one) are
therefore kept side by side as one FFN of 17 x 64 columns whose hidden activations are multiplied by the routing
weight of the expert that owns the column, zero for the experts that were not chosen. This is algebraically the
routed MoE, because the routing weight scales the expert's output and the down projection is linear; it spends
3.4x the FLOPs of a sparse MoE on tensor cores that would otherwise idle. `export.py` cuts it into Hy3's tensors and
its test holds the result to `transformers`' HYV3 implementation.

Tokens are a flat axis of T = batch * length, so that everything outside attention compiles once for every length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults are the shipped ones."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    dense_intermediate: int = 1024
    experts: int = 16
    top_k: int = 4
    expert_intermediate: int = 64
    router_scale: float = 2.826
    rope_theta: float = 11_158_840.0
    eps: float = 1e-5
    positions: int = 32_768


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis in fp32; returns the dtype of `x`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half RoPE. x [T, heads, head_dim], cos and sin [T, 1, head_dim / 2] in fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def qkv(
    x: Tensor,
    norm: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed, rotated heads of x [T, hidden]: q [T, heads, head_dim], k and v [T, kv_heads, head_dim]."""
    h = rms_norm(x, norm, eps)
    q = F.linear(h, wq.to(h.dtype)).unflatten(-1, (-1, head_dim))  # type: ignore[no-untyped-call]
    k = F.linear(h, wk.to(h.dtype)).unflatten(-1, (-1, head_dim))  # type: ignore[no-untyped-call]
    v = F.linear(h, wv.to(h.dtype)).unflatten(-1, (-1, head_dim))  # type: ignore[no-untyped-call]
    return rotate(rms_norm(q, q_norm, eps), cos, sin), rotate(rms_norm(k, k_norm, eps), cos, sin), v


def dense_ffn(
    x: Tensor, attended: Tensor, wo: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """Output projection, residual, SwiGLU, residual."""
    x = x + F.linear(attended, wo.to(x.dtype))
    h = rms_norm(x, norm, eps)
    return x + F.linear(F.silu(F.linear(h, gate.to(h.dtype))) * F.linear(h, up.to(h.dtype)), down.to(h.dtype))


def route(h: Tensor, router: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Routing weights [T, experts] (fp32, zero where not chosen) and the number of tokens each expert got [experts]."""
    scores = torch.sigmoid(F.linear(h.float(), router))
    chosen = torch.zeros_like(scores).scatter(1, torch.topk(scores.detach() + bias, top_k, dim=-1).indices, 1.0)
    weights = scores * chosen
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale, chosen.sum(0)


def moe_ffn(
    x: Tensor,
    attended: Tensor,
    wo: Tensor,
    norm: Tensor,
    router: Tensor,
    bias: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    top_k: int,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Output projection, residual, routed and shared experts, residual; also the load of each expert."""
    x = x + F.linear(attended, wo.to(x.dtype))
    h = rms_norm(x, norm, eps)
    weights, load = route(h, router, bias, top_k, scale)
    with_shared = torch.cat((weights, torch.ones_like(weights[:, :1])), dim=-1).to(h.dtype)
    hidden = F.silu(F.linear(h, gate.to(h.dtype))) * F.linear(h, up.to(h.dtype))
    by_expert = hidden.unflatten(-1, (with_shared.shape[-1], -1))  # type: ignore[no-untyped-call]
    hidden = (by_expert * with_shared.unsqueeze(-1)).flatten(-2)
    return x + F.linear(hidden, down.to(h.dtype)), load


def head_loss(h: Tensor, head: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of the cross entropies of h [T, hidden], each token's loss [T] (detached), and first choices [T]."""
    logits = F.linear(h, head.to(h.dtype)).float()
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * weight).sum(), losses.detach(), logits.detach().argmax(-1)


class Block(nn.Module):
    """One decoder layer: dense when `moe` is false."""

    bias: Tensor

    def __init__(self, shape: Shape, moe: bool) -> None:
        super().__init__()
        self.shape, self.moe = shape, moe
        s, width = shape, shape.heads * shape.head_dim
        self.input_norm = nn.Parameter(torch.ones(s.hidden))
        self.wq = nn.Parameter(torch.empty(width, s.hidden))
        self.wk = nn.Parameter(torch.empty(s.kv_heads * s.head_dim, s.hidden))
        self.wv = nn.Parameter(torch.empty(s.kv_heads * s.head_dim, s.hidden))
        self.q_norm = nn.Parameter(torch.full((s.head_dim,), 1.25))
        self.k_norm = nn.Parameter(torch.full((s.head_dim,), 1.25))
        self.wo = nn.Parameter(torch.empty(s.hidden, width))
        self.post_norm = nn.Parameter(torch.ones(s.hidden))
        columns = (s.experts + 1) * s.expert_intermediate if moe else s.dense_intermediate
        if moe:
            self.router = nn.Parameter(torch.empty(s.experts, s.hidden))
            self.register_buffer("bias", torch.zeros(s.experts))
        self.gate = nn.Parameter(torch.empty(columns, s.hidden))
        self.up = nn.Parameter(torch.empty(columns, s.hidden))
        self.down = nn.Parameter(torch.empty(s.hidden, columns))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden] with T a multiple of `length`; attention is causal inside each run of `length` tokens."""
        s = self.shape
        q, k, v = qkv(
            x, self.input_norm, self.wq, self.wk, self.wv, self.q_norm, self.k_norm, cos, sin, s.head_dim, s.eps
        )
        q, k, v = (t.view(-1, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended = attended.transpose(1, 2).reshape(x.shape[0], -1)
        if not self.moe:
            return dense_ffn(x, attended, self.wo, self.post_norm, self.gate, self.up, self.down, s.eps), None
        return moe_ffn(
            x,
            attended,
            self.wo,
            self.post_norm,
            self.router,
            self.bias,
            self.gate,
            self.up,
            self.down,
            s.top_k,
            s.router_scale,
            s.eps,
        )


class Hy3Tiny(nn.Module):
    """The decoder and its multi-token-prediction layer."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.empty(shape.vocab, shape.hidden))
        self.blocks = nn.ModuleList(Block(shape, moe=i > 0) for i in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.head = nn.Parameter(torch.empty(shape.vocab, shape.hidden))
        self.mtp_enorm = nn.Parameter(torch.ones(shape.hidden))
        self.mtp_hnorm = nn.Parameter(torch.ones(shape.hidden))
        self.mtp_proj = nn.Parameter(torch.empty(shape.hidden, 2 * shape.hidden))
        self.mtp_block = Block(shape, moe=True)
        self.mtp_norm = nn.Parameter(torch.ones(shape.hidden))
        half = shape.head_dim // 2
        frequency = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(shape.positions, dtype=torch.float64)[:, None] * frequency
        self.register_buffer("cos", angle.cos().float().unsqueeze(1), persistent=False)
        self.register_buffer("sin", angle.sin().float().unsqueeze(1), persistent=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Normal weights of 1/sqrt(fan-in), residual outputs divided by sqrt(2 * layers)."""
        residual = (2 * self.shape.layers) ** -0.5
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            std = 0.5 * p.shape[1] ** -0.5
            if name == "embed":
                std = 0.5
            elif name == "head":
                std = 0.01
            elif name.endswith((".wo", ".down")):
                std *= residual
            with torch.no_grad():
                p.copy_(torch.randn(p.shape, generator=generator) * std)

    def tables(self, tokens: int, length: int) -> tuple[Tensor, Tensor]:
        """RoPE tables [T, 1, head_dim / 2] for `tokens` tokens in runs of `length`."""
        runs = tokens // length
        return self.cos[:length].repeat(runs, 1, 1), self.sin[:length].repeat(runs, 1, 1)

    def trunk(self, ids: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Post-final-norm hidden [T, hidden] of ids [T], and the expert load of each MoE layer."""
        cos, sin = self.tables(ids.shape[0], length)
        x, loads = F.embedding(ids, self.embed).to(dtype), []
        for block in self.blocks:
            x, load = block(x, cos, sin, length)
            if load is not None:
                loads.append(load)
        return rms_norm(x, self.norm, self.shape.eps), loads

    def draft(self, hidden: Tensor, next_ids: Tensor, length: int, embed: Tensor) -> tuple[Tensor, Tensor]:
        """MTP hidden [T, hidden] from `hidden` at t and the token at t + 1; a run's first position sees zeros."""
        cos, sin = self.tables(next_ids.shape[0], length)
        first = (torch.arange(next_ids.shape[0], device=next_ids.device) % length == 0).unsqueeze(-1)
        embedded = F.embedding(next_ids, embed).to(hidden.dtype).masked_fill(first, 0)
        x = mtp_input(embedded, hidden, self.mtp_enorm, self.mtp_hnorm, self.mtp_proj, self.shape.eps)
        x, load = self.mtp_block(x, cos, sin, length)
        return rms_norm(x, self.mtp_norm, self.shape.eps), load

    def moe_blocks(self) -> list[Block]:
        """The blocks whose selection bias is balanced, in the order of their loads (MTP last)."""
        return [b for b in self.blocks if isinstance(b, Block) and b.moe] + [self.mtp_block]


def mtp_input(embedded: Tensor, hidden: Tensor, enorm: Tensor, hnorm: Tensor, proj: Tensor, eps: float) -> Tensor:
    """eh_proj(concat[enorm(embedding), hnorm(hidden)]): the embedding comes first."""
    return F.linear(
        torch.cat((rms_norm(embedded, enorm, eps), rms_norm(hidden, hnorm, eps)), dim=-1), proj.to(hidden.dtype)
    )


def compile_pieces() -> None:
    """Replace the token-wise pieces by compiled ones: each is compiled once and shared by all layers."""
    module = globals()
    for name in ("qkv", "dense_ffn", "moe_ffn", "head_loss", "mtp_input"):
        module[name] = torch.compile(module[name], dynamic=False)
