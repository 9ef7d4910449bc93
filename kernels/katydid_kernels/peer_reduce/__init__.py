"""Reductions over the GPUs of one host by plain loads and stores into each other's memory, fused with what follows.

    allreduce_add_rms_norm:    s = sum_r x_r + residual;  y = s / rms(s) * weight, in bf16 or e4m3 with a scale a token
    quantized_reduce_scatter:  rows of a rank's share, each summand in e4m3 with a scale a token
    quantized_all_gather:      rows of all ranks, in e4m3 with a scale a token

Two ways for the first. Few tokens: every rank writes its rows to all others and each sums them all (one crossing of
the link; the data are their own flags: `lamport_kernel`). Many: ranks write rows to their owners, which sum them and
write the results to all (two crossings of 1/n of the data, in bf16 or e4m3, see `two_shot_kernel`). NVLink multicast is
not used. Where something else is computed meanwhile, the same goes by copy engines: `copies`.

Sums run over the ranks in order, so all ranks come to the same bits.
"""

from katydid_kernels.peer_reduce.copies import PARTS, PeerCopies
from katydid_kernels.peer_reduce.op import (
    PeerReducer,
    add_rms_norm_of_ranks_reference,
    quantized_all_gather_reference,
    quantized_reduce_scatter_reference,
)
from katydid_kernels.peer_reduce.peers import PeerMemory, emulated_peers, symmetric_peers

__all__ = [
    "PARTS",
    "PeerCopies",
    "PeerMemory",
    "PeerReducer",
    "add_rms_norm_of_ranks_reference",
    "emulated_peers",
    "quantized_all_gather_reference",
    "quantized_reduce_scatter_reference",
    "symmetric_peers",
]
