"""Attention of one to eight new tokens per request over a paged KV cache: the decode half of attention.

    out[b, i] = sum_j softmax_j(cap(scale * q[b, i] . k[b, j])) v[b, j]        j <= context_lens[b] - q_len + i

Bound by memory: every key and value byte is read once.  What a decode kernel loses to that bound it loses to idle CTAs
(one long request beside short ones), to loads that are not deep enough in flight, and to the launch and the combine.
`decode_plan` deals with the first, the Hopper kernel with the others.
"""

from __future__ import annotations

from katydid_kernels.decode_attention.launch import DecodeScratch, decode_ctas
from katydid_kernels.decode_attention.op import decode_attention
from katydid_kernels.decode_attention.reference import decode_attention_reference

__all__ = ["DecodeScratch", "decode_attention", "decode_attention_reference", "decode_ctas"]
