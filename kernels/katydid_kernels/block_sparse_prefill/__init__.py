"""Causal attention of new tokens to listed blocks of 128 keys: `prefill_attention` where the blocks were chosen.

    out[t] = sum over blocks b listed for t's tile and head, over j in b: softmax_j(scale * q[t] . k[j]) v[j]     j <= t

Same pages, same operands and the same arithmetic as the dense kernel, whose building blocks it shares; only which tiles
of keys are read comes from lists, newest first. All heads of a query tile have equally many blocks, a number known
before the step, so tiles are dealt over the SMs heaviest first, as the dense kernel's are, and long lists in pieces
whose results a second launch combines. Bound by the tensor cores:
4 * head_dim operations per (query, key of a listed block) and head.
"""

from katydid_kernels.block_sparse_prefill.op import block_sparse_prefill
from katydid_kernels.block_sparse_prefill.reference import block_sparse_prefill_reference

__all__ = ["block_sparse_prefill", "block_sparse_prefill_reference"]
