"""Causal attention of new tokens over a paged KV cache: the prefill half of attention.

    out[t] = sum_j softmax_j(cap(scale * q[t] . k[j])) v[j]        j <= position(t), j > position(t) - window

Every row brings some new tokens (a whole prompt, or one chunk of it) whose keys and values are already in its pages, so
one loop serves a first chunk, a later chunk and a prefix found in the cache.  K pages hold tokens as rows and V pages
hold tokens as columns: both products then read operands along their contraction axis, the only order the fp8 tensor
cores take.  Bound by the tensor cores: 4 * head_dim operations per (query, visible key) and head.
"""

from __future__ import annotations

from katydid_kernels.prefill_attention.op import prefill_attention
from katydid_kernels.prefill_attention.plan import prefill_plan
from katydid_kernels.prefill_attention.reference import prefill_attention_reference

__all__ = ["prefill_attention", "prefill_attention_reference", "prefill_plan"]
