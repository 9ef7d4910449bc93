"""A whole model in plain fp32 arithmetic, its draft layers too, to learn by: all experts of a layer side by side.

Every expert computes every token, and the routing weight is zero where a token did not choose it: the same function,
in few large products instead of many small ones, at the price of experts / top_k of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from katydid_engine.quantize.block import Block, gated, rms_norm

__all__ = ["Draft", "ExpertStack", "Layer", "WholeModel", "stacked"]


@dataclass(frozen=True)
class ExpertStack:
    """gate and up ``[experts * n, hidden]``, down ``[hidden, experts * n]``."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Layer:
    """A decoder layer; of a sparse one the block holds no routed experts."""

    block: Block
    experts: ExpertStack | None = None

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """``[S, T, hidden]`` behind the layer."""
        block = self.block
        x = block.leave_attention(x, block.attend(block.enter_attention(x), angles))
        return x + self.feed_forward(block.enter_feed_forward(x).flatten(0, 1)).view_as(x)

    def feed_forward(self, entered: Tensor) -> Tensor:
        """What the block adds to x ``[T, hidden]``, out of the rows of ``enter_feed_forward``."""
        block = self.block
        rows = block.rows(entered)
        if self.experts is None:
            return block.product("mlp.down_proj", block.hidden("mlp", rows))
        weights, ids = block.route(entered)
        assert block.config.moe is not None
        shares = torch.zeros(len(rows), block.config.moe.num_experts, device=rows.device).scatter(1, ids, weights)
        hidden = gated(F.linear(rows, self.experts.gate), F.linear(rows, self.experts.up))
        hidden = block.rows(hidden.view(*shares.shape, -1)) * shares[..., None]
        out = F.linear(hidden.flatten(1), self.experts.down)
        if block.shared:
            out = out + block.product(f"{block.shared}.down_proj", block.hidden(block.shared, rows))
        return out


@dataclass(frozen=True)
class Draft:
    """A draft layer: a decoder layer of the next tokens' embeddings joined with the model's hidden states."""

    layer: Layer

    def hidden(self, embedded: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Out of ``[S, T, hidden]`` each, what the head reads."""
        block = self.layer.block
        eps, tensors = block.config.rms_norm_eps, block.tensors
        merged = (
            rms_norm(embedded, tensors["enorm.weight"], eps),
            rms_norm(hidden, tensors["hnorm.weight"], eps),
        )
        x = self.layer(F.linear(torch.cat(merged, -1), tensors["eh_proj.weight"]), angles)
        return rms_norm(x, tensors["final_layernorm.weight"], eps)


@dataclass(frozen=True)
class WholeModel:
    """Embedding and head ``[vocab, hidden]``, the final norm's gain, layers, draft layers."""

    embedding: Tensor
    head: Tensor
    norm: Tensor
    layers: Sequence[Layer]
    drafts: Sequence[Draft] = ()

    def hidden(self, ids: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """``[S, T, hidden]`` of int64 ``[S, T]``: what the head reads."""
        x = F.embedding(ids, self.embedding)
        for layer in self.layers:
            x = layer(x, angles)
        return rms_norm(x, self.norm, self.layers[0].block.config.rms_norm_eps)

    def draft_hidden(self, ids: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> list[Tensor]:
        """``[S, T - 1, hidden]`` of each draft layer, out of what ``hidden`` gave; the next token's embedding is blank
        at the first position, as the engine has it."""
        embedded = F.embedding(ids[:, 1:], self.embedding)
        embedded = torch.cat((torch.zeros_like(embedded[:, :1]), embedded[:, 1:]), 1)
        shorter = (angles[0][:-1], angles[1][:-1])
        return [draft.hidden(embedded, hidden[:, :-1], shorter) for draft in self.drafts]

    def logits(self, ids: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """``[S, T, vocab]`` of int64 ``[S, T]``."""
        return self.hidden(ids, angles) @ self.head.T


def stacked(block: Block) -> Layer:
    """The layer of a block that holds its experts one by one."""
    if not block.sparse:
        return Layer(block)
    gate, up, down = ([block.tensors[f"{one}.{part}_proj.weight"] for one in block.experts()] for part in _PARTS)
    rest = {name: tensor for name, tensor in block.tensors.items() if ".experts." not in name}
    return Layer(replace(block, tensors=rest), ExpertStack(torch.cat(gate), torch.cat(up), torch.cat(down, 1)))


_PARTS = ("gate", "up", "down")
