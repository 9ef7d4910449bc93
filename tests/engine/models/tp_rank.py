"""One rank of a TP group over gloo, started by ``test_tensor_parallel`` as a process of its own.

Arguments: rank, rendezvous file, and a JSON list of jobs ``{folder, plan, prompt, steps, output}``; rank 0 saves hidden
states of the prompt and greedy tokens.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from katydid_engine.collectives import TorchCollectives
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.parallel import ParallelPlan


def main() -> None:
    faulthandler.enable()  # an abort in native code says where
    rank, rendezvous, jobs = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    collectives = TorchCollectives()
    for job in jobs:
        model = load_model(Path(job["folder"]), plan=ParallelPlan(**job["plan"]), collectives=collectives)
        ids, pages = job["prompt"], list(range(4))
        cache = model.new_kv_cache(4)
        hidden = model.forward(ForwardBatch.pack([TokenRun(ids, 0, pages)]), cache)
        logits = model.logits(hidden)
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < job["steps"]:
            run = TokenRun([tokens[-1]], len(ids) + len(tokens) - 1, pages)
            step = model.forward(ForwardBatch.pack([run], num_decodes=1), cache)
            tokens.append(int(model.logits(step).argmax()))
        if rank == 0:
            torch.save({"logits": logits, "tokens": tokens, "heads": cache.k_pages[0].shape[1]}, job["output"])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads have been seen to abort a process whose results were long written while it was torn down


if __name__ == "__main__":
    main()
