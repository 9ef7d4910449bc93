"""The best token of a part of the vocabulary, so that ranks which hold the parts choose by telling each other little.

    score(token) = logit / temperature + Gumbel noise of (seed, position, token);  the logit alone at temperature 0

The largest score over all parts is that of `sample` without filters: the same noise, rounded the same way, and of
equals the lowest id. So a row costs its part's share of the vocabulary and twelve bytes of each chunk of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from katydid_kernels.philox import gumbel_noise
from katydid_kernels.sample.row_values import gumbel_about, gumbel_at, largest

__all__ = [
    "CHUNK",
    "best_of_part",
    "best_of_part_reference",
    "best_of_parts",
    "best_of_parts_reference",
    "launch",
    "launch_choice",
]

CHUNK = 2048


def best_of_part(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, first: int, room: int
) -> Tensor:
    """The best of every chunk of a part: int32 ``[R, ceil(room / CHUNK), 3]``.

    The last dimension is the bits of its fp32 score, its id, and the bits of the chunk's largest logit, which is no
    number where any of them is none. What `best_of_parts` takes, side by side.

    Args:
        logits: fp32 or bf16 ``[R, n]``, rows contiguous, of the tokens ``first`` and on.
        temperature: fp32 ``[R]``; 0 is greedy.
        seeds: int64 ``[R]``, the bits of a uint64.
        positions: int32 ``[R]``.
        room: of the largest part; those that this one has fewer are never chosen.

    Raises ValueError for parameters of other rows, and for more logits than there is room.
    """
    rows, size = logits.shape
    for name, given in (("temperature", temperature), ("seeds", seeds), ("positions", positions)):
        if given.shape != (rows,):
            raise ValueError(f"{name} must be [{rows}], got {list(given.shape)}")
    if size > room:
        raise ValueError(f"logits must have at most room={room} columns, got {size}")
    best_of = launch if logits.is_cuda else best_of_part_reference
    return best_of(logits, temperature, seeds, positions, first=first, room=room)


def launch(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, first: int, room: int) -> Tensor:
    rows, size = logits.shape
    chunks = -(-room // CHUNK)
    out = torch.empty(rows, chunks, 3, dtype=torch.int32, device=logits.device)
    if rows:
        best_of_part_kernel[(chunks, rows)](
            logits, logits.stride(0), temperature, seeds, positions, out, size, first, CHUNK=CHUNK, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def best_of_parts(told: Tensor, *, sound: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Of all parts' chunks, int32 ``[R, chunks, 3]``, in the order of their ids: each row's token, int32 ``[R]``, and
    whether its largest logit is a number, bool ``[R]``, written into ``sound`` where that is given."""
    sound = torch.empty(len(told), dtype=torch.bool, device=told.device) if sound is None else sound
    choose = launch_choice if told.is_cuda else best_of_parts_reference
    return choose(told, sound), sound


def launch_choice(told: Tensor, sound: Tensor) -> Tensor:
    rows, chunks, _ = told.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=told.device)
    if rows:
        best_of_parts_kernel[(rows,)](
            told.contiguous(), tokens, sound, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1
        )  # fmt: skip
    return tokens


@triton.jit
def best_of_parts_kernel(told_ptr, tokens_ptr, sound_ptr, chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    place = told_ptr + (row.to(tl.int64) * chunks + chunk) * 3
    inside = chunk < chunks
    score = tl.load(place, mask=inside, other=0).to(tl.float32, bitcast=True)
    score = tl.where(inside, score, float("-inf"))
    ids = tl.load(place + 1, mask=inside, other=0)
    logit = tl.load(place + 2, mask=inside, other=0).to(tl.float32, bitcast=True)
    logit = tl.where(inside, logit, float("-inf"))
    # Nothing equals what is no number: then the first.
    first = tl.min(tl.where(score == tl.max(score, 0), chunk, BLOCK), 0)
    first = tl.where(first == BLOCK, 0, first)
    tl.store(tokens_ptr + row, tl.sum(tl.where(chunk == first, ids, 0), 0))
    tl.store(sound_ptr + row, tl.abs(tl.reduce(logit, 0, largest)) < float("inf"))


def best_of_parts_reference(told: Tensor, sound: Tensor) -> Tensor:
    scores, ids, largest_logits = told.unbind(-1)
    best = scores.view(torch.float32).argmax(-1, keepdim=True)
    sound.copy_(largest_logits.view(torch.float32).amax(-1).isfinite())
    return ids.gather(1, best).squeeze(1)


@triton.jit(do_not_specialize=["size", "first"])
def best_of_part_kernel(
    logits_ptr, logits_stride, temperature_ptr, seeds_ptr, positions_ptr, out_ptr, size, first, CHUNK: tl.constexpr
):  # fmt: skip
    """Program (chunk, row)."""
    row = tl.program_id(1).to(tl.int64)
    local = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * logits_stride + local, mask=local < size, other=float("-inf")).to(tl.float32)
    token = first + local
    temperature = tl.load(temperature_ptr + row)
    score = x
    if temperature > 0:
        seed = tl.load(seeds_ptr + row).to(tl.uint64)
        position = tl.load(positions_ptr + row)
        scaled = x * tl.div_rn(1.0, temperature)
        about = scaled + gumbel_about(seed, position, token)
        most = tl.max(about, 0)
        # Only what may win is worth exact noise: as a rule one token.
        close = about >= most - 1e-3 - tl.abs(most) * 1e-6
        if tl.sum(close.to(tl.int32), 0) == 1:
            two = tl.zeros((2,), tl.int32) + tl.sum(tl.where(close, token, 0), 0)
            exact = tl.sum(tl.where(close, scaled, 0.0), 0) + tl.max(gumbel_at(seed, position, two), 0)
            score = tl.where(close, exact, float("-inf"))
        else:
            score = scaled + gumbel_at(seed, position, token)
    best = tl.max(score, 0)
    place = tl.min(tl.where(score == best, token, 2147483647), 0)
    # Nothing equals what is no number.
    place = tl.where(place == 2147483647, first + tl.program_id(0) * CHUNK, place)
    out_ptr += (row * tl.num_programs(0) + tl.program_id(0)) * 3
    tl.store(out_ptr, best.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 1, place)
    tl.store(out_ptr + 2, tl.reduce(x, 0, largest).to(tl.int32, bitcast=True))


def best_of_part_reference(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, first: int, room: int
) -> Tensor:
    chunks = -(-room // CHUNK)
    x = F.pad(logits.float(), (0, chunks * CHUNK - logits.shape[1]), value=-torch.inf)
    warm = (temperature > 0).unsqueeze(1)
    inverse = (1 / torch.where(temperature > 0, temperature, 1)).unsqueeze(1)
    noise = gumbel_noise(seeds, positions, x.shape[1], first=first)
    scores, inside = torch.where(warm, x * inverse + noise, x).view(-1, chunks, CHUNK).max(-1)
    ids = first + torch.arange(chunks, device=x.device) * CHUNK + inside
    most = x.view(-1, chunks, CHUNK).amax(-1)
    return torch.stack((scores.view(torch.int32), ids.to(torch.int32), most.view(torch.int32)), dim=-1)
