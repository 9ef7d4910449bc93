"""One decoder layer in plain fp32 arithmetic, in stages between which calibration looks at the rows of each matrix.

    x -> norm -> rows of q, k, v -> attention -> rows of o -> x -> norm -> rows of gate, up, router -> rows of down -> x

It serves every architecture that `katydid quantize` takes; tests hold it to the engine's own layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from katydid_engine.model_config import ModelConfig
from katydid_engine.quantize.fused import fused
from katydid_engine.quantize.pages import PageRounding
from katydid_engine.quantize.precision import causal_attention
from katydid_engine.quantize.rows import Rows, plain_rows

__all__ = ["Block", "gated", "rms_norm", "rotary_angles", "rotated"]

_ROUTERS = ("mlp.router.gate.weight", "mlp.gate.weight")
_BIASES = ("mlp.expert_bias", "mlp.router.gate.e_score_correction_bias", "mlp.gate.e_score_correction_bias")
_SHARED = ("mlp.shared_mlp", "mlp.shared_experts")


@fused
def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


@fused
def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def rotary_angles(table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[length, 1, head_dim / 2]`` out of the engine's rotary table."""
    cos, sin = table[:length].float().chunk(2, dim=-1)
    return cos[:, None], sin[:, None]


@dataclass(frozen=True)
class Block:
    """A decoder layer.

    Attributes:
        tensors: fp32, by their names below the layer's prefix; experts one by one.
        sparse: the feed-forward block is routed experts.
        rows: applied before every quantised matrix.
        pages: what K and V lose on their way through pages; None where these keep the dtype.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    sparse: bool
    rows: Rows = plain_rows
    pages: PageRounding | None = None

    def matrices(self) -> list[str]:
        """Names of what is quantised, without ".weight", in the order of computation."""
        attention = [f"self_attn.{name}_proj" for name in "qkvo"]
        return attention + [f"{block}.{part}_proj" for block in self.dense_blocks() for part in ("gate", "up", "down")]

    def dense_blocks(self) -> list[str]:
        """Prefixes of gate, up and down: routed experts first, then the shared one; or the one dense block."""
        if not self.sparse:
            return ["mlp"]
        return [*self.experts(), *([self.shared] if self.shared else [])]

    def experts(self) -> list[str]:
        assert self.config.moe is not None
        return [f"mlp.experts.{expert}" for expert in range(self.config.moe.num_experts)]

    @property
    def shared(self) -> str:
        """Prefix of the shared expert; empty without one."""
        return next((name for name in _SHARED if f"{name}.gate_proj.weight" in self.tensors), "")

    @property
    def router(self) -> str:
        """Name of the router's weight."""
        return next(name for name in _ROUTERS if name in self.tensors)

    def product(self, name: str, rows: Tensor) -> Tensor:
        """``rows`` times a matrix, with its bias; the rows as they are."""
        return F.linear(rows, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def enter_attention(self, x: Tensor) -> Tensor:
        return self.rows(rms_norm(x, self.tensors["input_layernorm.weight"], self.config.rms_norm_eps))

    def heads(self, rows: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[S, T, heads, head_dim]``, k and v ``[S, T, kv_heads, head_dim]``, normed and rotated."""
        config = self.config
        q, k, v = (
            self.product(f"self_attn.{name}_proj", rows).view(*rows.shape[:-1], -1, config.head_dim) for name in "qkv"
        )
        if config.qk_norm:
            q = rms_norm(q, self.tensors["self_attn.q_norm.weight"], config.rms_norm_eps)
            k = rms_norm(k, self.tensors["self_attn.k_norm.weight"], config.rms_norm_eps)
        return rotated(q, *angles), rotated(k, *angles), v

    def attend(self, rows: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rows of the output projection, ``[S, T, heads * head_dim]``."""
        heads = self.heads(rows, angles)
        q, k, v = (part.transpose(1, 2) for part in (heads if self.pages is None else self.pages(*heads)))
        group = self.config.num_heads // self.config.num_kv_heads
        k, v = (part.repeat_interleave(group, 1) for part in (k, v))
        out = causal_attention(q, k, v)
        return self.rows(out.transpose(1, 2).flatten(2))

    def leave_attention(self, x: Tensor, rows: Tensor) -> Tensor:
        return x + self.product("self_attn.o_proj", rows)

    def enter_feed_forward(self, x: Tensor) -> Tensor:
        """Rows before they are quantised: the router reads them so."""
        return rms_norm(x, self.tensors["post_attention_layernorm.weight"], self.config.rms_norm_eps)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights fp32 and expert ids ``[T, top_k]`` of rows ``[T, hidden]``."""
        moe = self.config.moe
        assert moe is not None
        logits = F.linear(rows, self.tensors[self.router])
        scores = logits.sigmoid() if moe.scoring == "sigmoid" else logits.softmax(-1)
        bias = next((self.tensors[name] for name in _BIASES if name in self.tensors), None)
        ids = (scores if bias is None else scores + bias).topk(moe.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if moe.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * moe.routed_scale, ids

    def hidden(self, block: str, rows: Tensor) -> Tensor:
        """Rows of a block's down projection out of its (quantised) rows."""
        return self.rows(gated(self.product(f"{block}.gate_proj", rows), self.product(f"{block}.up_proj", rows)))

    def leave_feed_forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x ``[T, hidden]`` and the rows of ``enter_feed_forward``."""
        quantised = self.rows(rows)
        if not self.sparse:
            return x + self.product("mlp.down_proj", self.hidden("mlp", quantised))
        out = x.clone()
        weights, ids = self.route(rows)
        for expert, block in enumerate(self.experts()):
            tokens, choice = (ids == expert).nonzero(as_tuple=True)
            if len(tokens):
                made = self.product(f"{block}.down_proj", self.hidden(block, quantised[tokens]))
                out.index_add_(0, tokens, made * weights[tokens, choice, None])
        if self.shared:
            out += self.product(f"{self.shared}.down_proj", self.hidden(self.shared, quantised))
        return out


@fused
def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
