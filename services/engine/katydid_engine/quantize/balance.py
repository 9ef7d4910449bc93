"""Balances queries against keys, pair by pair of the columns that RoPE turns into each other, for keys in e4m3 pages.

    q k = (q / s) (s k)        for any s > 0, one for each pair: RoPE turns both columns of a pair alike

A rotated key's rounding falls on all columns alike, as large as the key; a score sees it as large as the query. With Q
and K the mean squares of a pair that product, ``sum(Q / s^2) sum(K s^2)``, is least for ``s^4 = Q / K`` and is then
``sum(sqrt(Q K))^2`` (Cauchy and Schwarz). K is what pages hold, without the mean that they leave out: with the mean
there is little to balance. s is folded into the gains of the norms of q and k, one for all heads of a layer, or where
there are none into the rows of both projections, one for each KV head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from katydid_engine.quantize.block import Block, rotated

__all__ = ["balance_keys"]

_GAINS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def balance_keys(
    block: Block,
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    turn: tuple[Tensor, Tensor] | None,
    gain_dtype: torch.dtype,
) -> Block:
    """The same layer with folded factors, but for what rounding its gains changes.

    Args:
        x: hidden states in front of the layer, ``[S, T, hidden]``.
        turn: what RoPE makes of a constant key on average, where the mean is left out of pages.
        gain_dtype: of the norms in the checkpoint that will be written.
    """
    config, (cos, sin) = block.config, angles
    q, k, _ = block.heads(block.enter_attention(x), angles)
    k = rotated(k, cos, -sin)
    queries, keys = (_pairs(part.square().mean((0, 1))) for part in (q, k))
    if turn is not None:
        left_out = rotated(k.mean((0, 1)), *(part.to(k.device) for part in turn))
        keys = (keys - _pairs(left_out.square())).clamp(min=0)
    group = config.num_heads // config.num_kv_heads
    queries = queries.view(config.num_kv_heads, group, -1).mean(1)
    if config.qk_norm:  # heads count alike, whatever the size of their scores
        queries, keys = ((part / part.sum(1, keepdim=True)).mean(0, keepdim=True) for part in (queries, keys))
    factors = (queries.clamp(min=1e-30) / keys.clamp(min=1e-30)) ** 0.25
    factors = factors / factors.log().mean(1, keepdim=True).exp()
    factors = torch.cat((factors, factors), 1)
    tensors = dict(block.tensors)
    if config.qk_norm:
        q_gain, k_gain = (tensors[name] for name in _GAINS)
        tensors[_GAINS[0]] = (q_gain / factors[0]).to(gain_dtype).float()
        tensors[_GAINS[1]] = (k_gain * factors[0]).to(gain_dtype).float()
        return replace(block, tensors=tensors)
    by_row = {"q": 1 / factors.repeat_interleave(group, 0).flatten(), "k": factors.flatten()}
    for part, rows in by_row.items():
        tensors[f"self_attn.{part}_proj.weight"] = tensors[f"self_attn.{part}_proj.weight"] * rows[:, None]
        bias = f"self_attn.{part}_proj.bias"
        if bias in tensors:
            tensors[bias] = tensors[bias] * rows
    return replace(block, tensors=tensors)


def _pairs(columns: Tensor) -> Tensor:
    """``[heads, head_dim]`` summed over the columns of a pair, ``[heads, head_dim / 2]``."""
    first, second = columns.chunk(2, -1)
    return first + second
