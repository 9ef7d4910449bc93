"""The public calls of the sampler check what comes in and pick the kernels for the logits' device."""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_kernels.sample.batch import Logprobs, SamplingBatch
from katydid_kernels.sample.launch import SampleScratch, launch_logprobs, launch_sample
from katydid_kernels.sample.reference import logprobs_reference, sample_reference

__all__ = ["logprobs", "sample"]


def sample(
    logits: Tensor,
    batch: SamplingBatch,
    *,
    out: Tensor | None = None,
    sound: Tensor | None = None,
    scratch: SampleScratch | None = None,
    overlap: bool = False,
) -> Tensor:
    """Returns token ids int32 ``[R]``.

    A row whose every token is banned yields token 0.

    Args:
        logits: fp32 or bf16 ``[R, V]``, rows contiguous, left as they are.
        out: int32 ``[R]``, where to write; with ``scratch``, nothing is allocated on a GPU.
        sound: bool ``[R]``, written: whether the largest logit of the tokens allowed is a number.
        scratch: of at least R rows and this vocabulary, of no other call that still runs; the reference needs none.
        overlap: let the kernel start before the preceding one ends (programmatic dependent launch). Then all but the
            logits, the mask and the seen counts must be older than what still runs as it starts.

    Raises ValueError for a field of the batch that does not fit.
    """
    rows, vocab = logits.shape
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "positions"):
        if getattr(batch, name).shape != (rows,):
            raise ValueError(f"{name} must be [{rows}], got {list(getattr(batch, name).shape)}")
    if batch.allowed is not None and batch.allowed.shape != (rows, -(-vocab // 32)):
        raise ValueError(f"allowed must be [{rows}, {-(-vocab // 32)}], got {list(batch.allowed.shape)}")
    if batch.penalties is not None and batch.penalties.seen.shape[1] != vocab:
        raise ValueError(f"seen must be [slots, {vocab}], got {list(batch.penalties.seen.shape)}")
    if batch.bias is not None and batch.bias.starts.shape != (rows + 1,):
        raise ValueError(f"bias.starts must be [{rows + 1}], got {list(batch.bias.starts.shape)}")
    for name, given, dtype in (("out", out, torch.int32), ("sound", sound, torch.bool)):
        if given is not None and (given.shape != (rows,) or given.dtype != dtype or not given.is_contiguous()):
            raise ValueError(f"{name} must be {dtype} [{rows}], contiguous, got {given.dtype} {list(given.shape)}")
    if not _has_kernel(logits):
        tokens = sample_reference(logits, batch, sound=sound)
        return tokens if out is None else out.copy_(tokens)
    if scratch is not None and (len(scratch.groups) < rows or scratch.groups.shape[1] < vocab // 16):
        raise ValueError(f"scratch must be for [{rows}, {vocab}], has {list(scratch.groups.shape)} groups of 16 tokens")
    return launch_sample(logits, batch, overlap=overlap, out=out, sound=sound, scratch=scratch)


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Log probabilities of given tokens and of the ``num_top`` likeliest, from the logits as the model made them.

    Args:
        logits: fp32 or bf16 ``[R, V]``, rows contiguous.
        token_ids: int ``[R]``.
        num_top: 0 .. V; of equals the lower ids come first.
    """
    if not _has_kernel(logits):
        return logprobs_reference(logits, token_ids, num_top)
    return launch_logprobs(logits, token_ids, num_top)


def _has_kernel(logits: Tensor) -> bool:
    return logits.is_cuda and torch.cuda.get_device_capability(logits.device)[0] >= 9
