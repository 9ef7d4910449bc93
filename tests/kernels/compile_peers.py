"""Compiles the reductions over peers for sm_90 as they are launched; prints JSON lines.

A script of its own because the kernels must be defined outside Triton's interpreter, which the tests beside it run in.
"""

from __future__ import annotations

import importlib

import torch
from plain_recorder import Recorder, record

op = importlib.import_module("katydid_kernels.peer_reduce.op")
peers = importlib.import_module("katydid_kernels.peer_reduce.peers")
RANKS, HIDDEN, TOKENS = 8, 4096, 1024


def main() -> None:
    for name, value in vars(op).copy().items():
        if name.endswith("_kernel"):
            setattr(op, name, Recorder(value))
    size = op.PeerReducer.nbytes(RANKS, HIDDEN, tokens=TOKENS)
    memory = peers.PeerMemory(0, (torch.zeros(size, dtype=torch.uint8),) * RANKS, torch.zeros(8, dtype=torch.int64))
    reducer = op.PeerReducer(memory, HIDDEN, tokens=TOKENS)
    x, weight = torch.zeros(16, HIDDEN, dtype=torch.bfloat16), torch.ones(HIDDEN)
    record({
        "few": lambda: reducer.all_reduce_few(x, x, weight, 1e-5, overlap=True),
        "sum": lambda: reducer.sum_few(x),
        "many": lambda: reducer.all_reduce_many(x, x[:2], weight, 1e-5, overlap=True),
        "quantized": lambda: reducer.all_reduce_many(x, x[:2], weight, 1e-5, quantized=True, fp8=True, own=x[:2]),
        "gather": lambda: reducer.quantized_all_gather(x),
        "scatter": lambda: reducer.quantized_reduce_scatter(x),
    })  # fmt: skip


if __name__ == "__main__":
    main()
