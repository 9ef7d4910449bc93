"""One rank of ``parallelism.py``'s loss: arguments rank, ranks, plan, model folder, where to meet, result file."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.parallel import ParallelPlan
from katydid_engine.rank_groups import join_groups
from tokenizers import Tokenizer

WINDOW = 1024
TEXT_BYTES = 40_000


def main() -> None:
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    plan, folder, meet, output = ParallelPlan.parse(sys.argv[3]), Path(sys.argv[4]), sys.argv[5], Path(sys.argv[6])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    groups = join_groups(plan, rank, timeout_s=120)
    model = load_model(folder, plan=plan, collectives=groups.tensor, experts=groups.experts)
    docs = Path(__file__).parents[1] / "docs"
    text = "".join(path.read_text() for path in sorted(docs.glob("*.md")))[:TEXT_BYTES]
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)]
    windows = windows[: len(windows) // plan.dp * plan.dp]
    pages = list(range(WINDOW // 64))
    nats = torch.zeros(1, dtype=torch.float64)
    for window in windows[plan.place(rank).dp :: plan.dp]:
        hidden = model.forward(ForwardBatch.pack([TokenRun(window, 0, pages)]), model.new_kv_cache(len(pages)))
        likelihood = model.logits(hidden).log_softmax(-1)
        nats -= likelihood[:-1].gather(1, torch.tensor(window[1:])[:, None]).double().sum()
    if plan.place(rank).tp:
        nats.zero_()
    dist.all_reduce(nats)
    decoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = sum(len(decoder.decode(window[1:], skip_special_tokens=False).encode()) for window in windows)
    if rank == 0:
        output.write_text(json.dumps({"bits_per_byte": float(nats) / math.log(2) / size, "bytes": size}))
    dist.barrier()
    os._exit(0)  # gloo's threads have been seen to abort a process while it was torn down


if __name__ == "__main__":
    main()
