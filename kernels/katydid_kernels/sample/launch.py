"""Launches the sampler's kernels; their scratch is a few per cent of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from katydid_kernels.sample.batch import Logprobs, SamplingBatch
from katydid_kernels.sample.candidates import CANDIDATES
from katydid_kernels.sample.choose_kernel import choose_kernel
from katydid_kernels.sample.logprob_kernel import logprob_kernel
from katydid_kernels.sample.scan_kernel import GROUPS, TILE, scan_kernel, tiles_a_program

__all__ = ["SampleScratch", "launch_logprobs", "launch_sample"]


@dataclass(frozen=True, slots=True)
class SampleScratch:
    """What the launches of a call hand each other, a few per cent of the logits; one call after another may use it.

    Attributes:
        group_max: fp32 ``[rows, tiles * GROUPS]``.
        tile_sums: fp32 ``[rows, tiles, 2]``, maximum and sum of exponentials.
        groups: int32 ``[rows, tiles * GROUPS]``, those that may hold what the filters keep.
        candidates: int64 ``[rows, CANDIDATES]``, logits and tokens.
    """

    group_max: Tensor
    tile_sums: Tensor
    groups: Tensor
    candidates: Tensor

    @staticmethod
    def allocate(rows: int, vocab_size: int, device: torch.device) -> SampleScratch:
        """For calls of up to ``rows`` rows."""
        tiles = triton.cdiv(vocab_size, TILE)
        return SampleScratch(
            torch.empty(rows, tiles * GROUPS, device=device),
            torch.empty(rows, tiles, 2, device=device),
            torch.empty(rows, tiles * GROUPS, dtype=torch.int32, device=device),
            torch.empty(rows, CANDIDATES, dtype=torch.int64, device=device),
        )


_NO_PARAMETERS = (None,) * 6


def launch_sample(
    logits: Tensor,
    batch: SamplingBatch,
    *,
    overlap: bool,
    chain: bool = True,
    out: Tensor | None = None,
    sound: Tensor | None = None,
    scratch: SampleScratch | None = None,
) -> Tensor:
    """Scan and choice. ``overlap``: the scan starts before the preceding kernel ends; ``chain``: so does the choice
    before the scan ends (off in the interpreter, which knows no such thing).
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    if rows == 0:
        return out
    scratch = SampleScratch.allocate(rows, vocab, logits.device) if scratch is None else scratch
    tiles, group_max, tile_sums, candidates = _parts(scratch, vocab)
    source = _source(logits, batch)
    parameters = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seeds, batch.positions)
    pending = 0 if batch.penalties is None or batch.penalties.pending is None else batch.penalties.pending.shape[1]
    span = tiles_a_program(rows, tiles, _num_sms(logits.device))
    scan_kernel[(triton.cdiv(tiles, span), rows)](
        *source, *parameters, group_max, tile_sums, vocab, tiles, span, PENDING=pending, EARLY=overlap,
        FOLLOWED=chain, num_warps=8, maxnreg=128, enable_fp_fusion=False, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    choose_kernel[(rows,)](
        *source, *parameters, group_max, tile_sums, *candidates, out, sound, vocab, TILES=tiles,
        BLOCK_TILES=triton.next_power_of_2(tiles), CANDIDATES=CANDIDATES, PENDING=pending, FOLLOWS=chain,
        num_warps=8, enable_fp_fusion=False, **({"launch_pdl": True} if chain else {}),
    )  # fmt: skip
    return out


def launch_logprobs(logits: Tensor, token_ids: Tensor, num_top: int, *, chain: bool = True) -> Logprobs:
    rows, vocab = logits.shape
    result = Logprobs(
        chosen=torch.empty(rows, device=logits.device),
        top_ids=torch.empty(rows, num_top, dtype=torch.int32, device=logits.device),
        top=torch.empty(rows, num_top, device=logits.device),
    )
    if rows == 0:
        return result
    tiles, group_max, tile_sums, candidates = _parts(SampleScratch.allocate(rows, vocab, logits.device), vocab)
    span = tiles_a_program(rows, tiles, _num_sms(logits.device))
    scan_kernel[(triton.cdiv(tiles, span), rows)](
        *_source(logits, None), *_NO_PARAMETERS, group_max, tile_sums, vocab, tiles, span, PENDING=0, EARLY=False,
        FOLLOWED=chain, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    logprob_kernel[(rows,)](
        logits, logits.stride(0), token_ids, group_max, tile_sums, *candidates, result.chosen, result.top_ids,
        result.top, vocab, num_top, TILES=tiles, BLOCK_TILES=triton.next_power_of_2(tiles), CANDIDATES=CANDIDATES,
        FOLLOWS=chain, num_warps=8, enable_fp_fusion=False, **({"launch_pdl": True} if chain else {}),
    )  # fmt: skip
    return result


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _parts(scratch: SampleScratch, vocab: int) -> tuple[int, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Tiles a row and the scratch as the kernels take it."""
    return (
        triton.cdiv(vocab, TILE), scratch.group_max, scratch.tile_sums,
        (scratch.groups, scratch.candidates),
    )  # fmt: skip


def _source(logits: Tensor, batch: SamplingBatch | None) -> tuple[Any, ...]:
    """What `adjusted_logits` reads, in its order; of plain logits without a batch."""
    penalties, bias, allowed = (batch.penalties, batch.bias, batch.allowed) if batch else (None, None, None)
    tokens: tuple[Any, ...] = (None, None, None, None, None, 0, None)
    if penalties is not None:
        tokens = (
            penalties.slots, penalties.repetition, penalties.presence, penalties.frequency, penalties.seen,
            penalties.seen.stride(0), penalties.pending,
        )  # fmt: skip
    biases = (None, None, None) if bias is None else (bias.starts, bias.token_ids, bias.values)
    mask = (None, 0) if allowed is None else (allowed, allowed.stride(0))
    return (logits, logits.stride(0), *tokens, *biases, *mask)
