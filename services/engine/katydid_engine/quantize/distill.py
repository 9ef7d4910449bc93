"""Learns the scales of int4 groups from the original model's logits: quantisation-aware training of scales alone.

Codes stay as they were chosen, so a weight is linear in its scales and gradients are exact; only rows are rounded to
e4m3 on the way, through which gradients pass as if they were not. The loss is KL(original || quantised) of the next
token, averaged over positions (Hinton et al., 2015, at temperature 1; the loss of the public Hy3 recipe). A scale moves
by a factor: what is learned is its logarithm's change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from katydid_engine.quantization import GROUP
from katydid_engine.quantize.block import Block, e4m3_rows, rms_norm
from katydid_engine.quantize.int4_weights import Int4Weights
from katydid_engine.quantize.recipe import Distillation

__all__ = ["WholeModel", "distill"]


@dataclass(frozen=True)
class WholeModel:
    """A model without draft layers, in fp32: embedding and head ``[vocab, hidden]``, the final norm's gain, layers."""

    embedding: Tensor
    head: Tensor
    norm: Tensor
    blocks: Sequence[Block]

    def logits(self, ids: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """``[S, T, vocab]`` of int64 ``[S, T]``."""
        x = F.embedding(ids, self.embedding)
        for block in self.blocks:
            x = block.leave_attention(x, block.attend(block.enter_attention(x), angles))
            rows = block.enter_feed_forward(x)
            x = block.leave_feed_forward(x.flatten(0, 1), rows.flatten(0, 1)).view_as(x)
        return rms_norm(x, self.norm, self.blocks[0].config.rms_norm_eps) @ self.head.T


def distill(
    original: WholeModel,
    quantised: WholeModel,
    int4: Sequence[Mapping[str, Int4Weights]],
    ids: Tensor,
    angles: tuple[Tensor, Tensor],
    options: Distillation,
    *,
    seed: int,
    report: Callable[[int, float], None],
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """New scales, bf16 ``[N, groups]`` by layer and matrix, and the loss of every step.

    Args:
        quantised: its layers' int4 matrices are those of ``int4``, by layer and name.
        ids: int64 ``[sequences, tokens]``.
        seed: of the order of sequences.
        report: called with the step and its loss.
    """
    changes = [
        {name: torch.zeros_like(weights.scales, dtype=torch.float32) for name, weights in layer.items()}
        for layer in int4
    ]
    learned = [change.requires_grad_() for layer in changes for change in layer.values()]
    optimizer = torch.optim.Adam(learned, lr=options.learning_rate)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        chosen = torch.randint(len(ids), (options.sequences,), generator=generator)
        batch = ids[chosen].to(original.embedding.device)
        with torch.no_grad():
            wanted = original.logits(batch, angles).log_softmax(-1)
        student = replace(quantised, blocks=_scaled(quantised.blocks, int4, changes))
        found = student.logits(batch, angles).log_softmax(-1)
        loss = F.kl_div(found, wanted, reduction="sum", log_target=True) / batch.numel()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
        report(step + 1, losses[-1])
    with torch.no_grad():
        scales = [
            {name: (weights.scales.float() * change[name].exp()).to(torch.bfloat16) for name, weights in layer.items()}
            for layer, change in zip(int4, changes, strict=True)
        ]
    return scales, losses


def _scaled(
    blocks: Sequence[Block], int4: Sequence[Mapping[str, Int4Weights]], changes: Sequence[Mapping[str, Tensor]]
) -> list[Block]:
    made = []
    for block, layer, change in zip(blocks, int4, changes, strict=True):
        tensors = dict(block.tensors)
        for name, weights in layer.items():
            scales = weights.scales.float() * change[name].exp()
            columns = weights.codes.shape[1]
            tensors[f"{name}.weight"] = weights.codes.float() * scales.repeat_interleave(GROUP, 1)[:, :columns]
        made.append(replace(block, tensors=tensors, rows=_straight_through))
    return made


def _straight_through(x: Tensor) -> Tensor:
    return x + (e4m3_rows(x) - x).detach()
