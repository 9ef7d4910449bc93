"""Learns how weights are rounded, from the original model's logits: scales of int4, and to which of two values.

The loss is KL(original || quantised) of the next token, averaged over positions (Hinton et al., 2015, at temperature 1;
the loss of the public Hy3 recipe). The quantised model rounds its rows, and its pages where they are e4m3, as it will
when it is served. Draft layers learn the original's drafts in the same way. Nothing else of the model is learned:
norms, routers and embedding stay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from katydid_engine.matrices import Fp8Matrix, Int4Matrix
from katydid_engine.quantize.block import Block
from katydid_engine.quantize.fused import fused, fusion
from katydid_engine.quantize.learned import LearnedFp8, LearnedInt4
from katydid_engine.quantize.precision import tf32_products
from katydid_engine.quantize.recipe import Distillation
from katydid_engine.quantize.replayed import Replayed
from katydid_engine.quantize.whole_model import Draft, ExpertStack, Layer, WholeModel

__all__ = ["QuantisedMatrix", "distill"]

QuantisedMatrix = Int4Matrix | Fp8Matrix
_WARM_UP = 10  # steps: Adam's first steps are as long as its rate says, whatever the gradient


def distill(
    original: WholeModel,
    quantised: WholeModel,
    matrices: Sequence[Mapping[str, QuantisedMatrix]],
    ids: Tensor,
    angles: tuple[Tensor, Tensor],
    options: Distillation,
    *,
    seed: int,
    report: Callable[[int, float], None],
) -> tuple[list[dict[str, QuantisedMatrix]], list[float]]:
    """The learned matrices, as they were given, and the loss of every step.

    Args:
        quantised: without its quantised matrices.
        matrices: these, by layer, draft layers last, and name below the layer's prefix.
        ids: int64 ``[sequences, tokens]``.
        seed: of the order of sequences.
        report: called with the step and its loss.
    """
    every = [*quantised.layers, *(draft.layer for draft in quantised.drafts)]
    learned = [_LearnedLayer(layer.block, found) for layer, found in zip(every, matrices, strict=True)]
    layers, drafts = learned[: len(quantised.layers)], learned[len(quantised.layers) :]
    by_rate: dict[float, list[Tensor]] = {}
    for tensor, rate in (pair for layer in learned for pair in layer.parameters(options)):
        by_rate.setdefault(rate, []).append(tensor)
    device = original.embedding.device
    optimizer = torch.optim.Adam(
        [{"params": tensors, "lr": torch.zeros((), device=device)} for tensors in by_rate.values()],
        betas=(0.9, 0.98),
        capturable=device.type == "cuda",
    )

    def one_step(batch: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = original.hidden(batch, angles)
            wanted = [hidden, *original.draft_hidden(batch, hidden, angles)]
        student = replace(
            quantised,
            layers=[layer.rounded() for layer in layers],
            drafts=[Draft(draft.rounded()) for draft in drafts],
        )
        hidden = student.hidden(batch, angles)
        # A draft layer learns from the hidden states that it will see; they do not learn from it.
        found = [hidden, *student.draft_hidden(batch, hidden.detach(), angles)]
        pairs = zip(found, wanted, strict=True)
        loss = torch.stack([_divergence(x @ student.head.T, y @ original.head.T) for x, y in pairs]).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    run = Replayed(one_step)
    losses: list[float] = []
    for step, chosen in enumerate(itertools.islice(drawn(len(ids), options.sequences, seed), options.steps)):
        part = min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        for group, rate in zip(optimizer.param_groups, by_rate, strict=True):
            group["lr"].fill_(rate * part)
        with tf32_products(device), fusion(device if options.fused else "cpu"):
            losses.append(float(run(ids[chosen].to(device))))
        report(step + 1, losses[-1])
    return [layer.matrices() for layer in learned], losses


def drawn(count: int, each: int, seed: int) -> Iterator[Tensor]:
    """Places of ``each`` of ``count`` sequences, without end: all of them come before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    while True:
        while len(order) < each:
            order = torch.cat((order, torch.randperm(count, generator=generator)))
        yield order[:each]
        order = order[each:]


@fused
def _divergence(found: Tensor, wanted: Tensor) -> Tensor:
    """KL(wanted || found) of logits ``[S, T, vocab]``, a position."""
    whole = F.kl_div(found.log_softmax(-1), wanted.log_softmax(-1), reduction="sum", log_target=True)
    return whole / (found.shape[0] * found.shape[1])


@dataclass(frozen=True)
class _Stack:
    """Matrices that are learned as one."""

    names: list[str]
    weights: LearnedInt4 | LearnedFp8

    @classmethod
    def of(cls, names: list[str], found: Mapping[str, QuantisedMatrix]) -> _Stack:
        int4 = [matrix for name in names if isinstance(matrix := found[name], Int4Matrix)]
        fp8 = [matrix for name in names if isinstance(matrix := found[name], Fp8Matrix)]
        assert not int4 or not fp8
        return cls(names, LearnedInt4(int4) if int4 else LearnedFp8(fp8))


class _LearnedLayer:
    """A layer's matrices while they are learned: experts by kind in one stack each, every other matrix alone."""

    def __init__(self, block: Block, found: Mapping[str, QuantisedMatrix]) -> None:
        self._block = block
        experts = block.experts() if block.sparse else []
        self._experts = [_Stack.of([f"{one}.{part}_proj" for one in experts], found) for part in _PARTS if experts]
        grouped = {name for stack in self._experts for name in stack.names}
        self._alone = [_Stack.of([name], found) for name in found if name not in grouped]

    def parameters(self, options: Distillation) -> list[tuple[Tensor, float]]:
        stacks = (*self._experts, *self._alone)
        return [pair for stack in stacks for pair in stack.weights.parameters(options)]

    def rounded(self) -> Layer:
        weights = {f"{stack.names[0]}.weight": stack.weights.weight() for stack in self._alone}
        block = replace(self._block, tensors=self._block.tensors | weights)
        if not self._experts:
            return Layer(block)
        gate, up, down = (stack.weights.weight() for stack in self._experts)
        count = len(self._experts[0].names)
        return Layer(block, ExpertStack(gate, up, torch.cat(down.chunk(count), 1)))

    def matrices(self) -> dict[str, QuantisedMatrix]:
        learned: dict[str, QuantisedMatrix] = {}
        for stack in (*self._experts, *self._alone):
            learned |= zip(stack.names, stack.weights.matrices(), strict=True)
        return learned


_PARTS = ("gate", "up", "down")
