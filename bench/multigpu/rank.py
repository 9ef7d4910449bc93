"""One rank of ``run.py``: arguments rank, ranks, where to meet, the jobs, where rank 0 tells rows as they come."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from agreement import correct
from exchanging import exchange, overlap
from halving import halves
from katydid_engine.parallel import ParallelPlan
from katydid_engine.rank_groups import join_groups
from moving import rebalance
from one_rank import Rank
from serving import serve
from telling import Told

PARTS: dict[str, Callable[..., None]] = {
    "correct": correct,
    "serve": serve,
    "halves": halves,
    "exchange": exchange,
    "overlap": overlap,
    "rebalance": rebalance,
}


def main() -> None:
    rank, ranks, meet = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    work = json.loads(sys.argv[4])
    told = Told(Path(sys.argv[5]))
    own = Rank(rank, ranks, meet, told, layers=work["layers"], dry=work["dry"])
    for job in work["jobs"]:
        plan = ParallelPlan.parse(job.pop("plan"))
        PARTS[job.pop("part")](own, plan, join_groups(plan, rank, timeout_s=120), **job)
        if rank == 0:
            told.job_done()
    own.meet()
    os._exit(0)  # gloo's threads have been seen to abort a process while it was torn down


if __name__ == "__main__":
    main()
