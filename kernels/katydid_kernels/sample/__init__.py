"""Choosing the next token of every row: penalties, bias, mask, temperature, top-k, top-p, min-p, then Gumbel-max.

In this order, each step on what the one before left:

    1. repetition penalty (Keskar et al., "CTRL", 2019) divides a seen token's logit if positive, else multiplies it
    2. frequency and presence penalty: subtracted per occurrence, and once, for tokens already generated
    3. logit bias: added; -inf bans a token (stop tokens before min_tokens)
    4. the allowed mask of a grammar
    5. temperature; 0 takes the largest logit (the lowest id among equals) and skips the rest
    6. top-k, top-p over what top-k left, min-p relative to the likeliest
    7. argmax of logits / temperature + Gumbel noise from Philox(seed, position)

Log probabilities are those of the model: log-softmax of the logits as they came in, before step 1.
"""

from katydid_kernels.sample.batch import IN_PROMPT, LogitBias, Logprobs, Penalties, SamplingBatch, seen_tokens
from katydid_kernels.sample.launch import SampleScratch
from katydid_kernels.sample.op import logprobs, sample
from katydid_kernels.sample.reference import logprobs_reference, sample_reference

__all__ = [
    "IN_PROMPT",
    "LogitBias",
    "Logprobs",
    "Penalties",
    "SampleScratch",
    "SamplingBatch",
    "logprobs",
    "logprobs_reference",
    "sample",
    "sample_reference",
    "seen_tokens",
]
