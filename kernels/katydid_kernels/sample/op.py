"""The public calls of the sampler: they pick the kernels for the logits' device."""

from __future__ import annotations

from torch import Tensor

from katydid_kernels.sample.batch import Logprobs, SamplingBatch
from katydid_kernels.sample.reference import logprobs_reference, sample_reference

__all__ = ["logprobs", "sample"]


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns token ids int32 ``[R]``.

    A row whose every token is banned yields token 0.

    Args:
        logits: fp32 ``[R, V]``, left as they are.
    """
    return sample_reference(logits, batch)


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Log probabilities of given tokens and of the ``num_top`` likeliest, from the logits as the model made them.

    Args:
        logits: fp32 ``[R, V]``.
        token_ids: int ``[R]``.
        num_top: 0 .. V.
    """
    return logprobs_reference(logits, token_ids, num_top)
