"""A minute on a GPU: requests of all kinds come and go, are aborted and preempted, while steps are graphs, with chunks
of prompts too, are planned ahead and verify drafts; every answer stands, and no page is lost."""

from __future__ import annotations

import os
import random
import time
from array import array
from collections import deque
from pathlib import Path

import pytest
import torch
from katydid_engine.block_pool import BlockPool
from katydid_engine.collectives import SingleRank
from katydid_engine.decode_steps import Captured
from katydid_engine.draft_depth import DraftDepth
from katydid_engine.loader import load_model
from katydid_engine.plan import StepPlan
from katydid_engine.request import FinishReason, Request, Sampling
from katydid_engine.runner import Runner
from katydid_engine.scheduler import Scheduler, SchedulerConfig
from katydid_engine.step_outcome import Launched
from katydid_runtime.block_hash import ChainKey

from tests.engine.test_decode_steps import flips, prompts

pytestmark = pytest.mark.gpu

TINY = Path(__file__).parents[2] / "models" / "hy3-tiny"
# At least so long and so many steps: on a card with other work, or with kernels still to be compiled, few fit a minute.
SECONDS, STEPS = float(os.environ.get("KATYDID_SOAK_S", "60")), 500
SEED = int(os.environ.get("KATYDID_SOAK_SEED", "5"))
CHECKED = 12


def a_request(handle: int, chance: random.Random, text: array[int]) -> Request:
    start, length = chance.randrange(len(text) - 500), chance.choice([1, 40, 64, 129, 300, 480])
    kinds = [
        Sampling(),
        Sampling(temperature=0.8, top_p=0.9, seed=handle),
        Sampling(temperature=1.0, top_k=20, seed=handle, n=2),
        Sampling(temperature=0.7, repetition_penalty=1.1, min_tokens=5, seed=handle),
        Sampling(logprobs=3, logit_bias=((7, -2.0),)),
    ]
    sampling = chance.choice([kinds[0], kinds[0], *kinds])
    limits = {"max_tokens": chance.choice([1, 7, 30, 90]), "ignore_eos": True}
    fields = {field: getattr(sampling, field) for field in Sampling.__dataclass_fields__} | limits
    return Request(handle, text[start : start + length], ChainKey(b"m" * 32), Sampling(**fields))


def test_a_minute_of_everything() -> None:
    model, chance = load_model(TINY, device="cuda", dtype=torch.bfloat16), random.Random(SEED)
    text = array("I", [token for prompt in prompts() for token in prompt] * 3)
    pool = BlockPool(96)
    config = SchedulerConfig(max_model_tokens=600, max_batch_tokens=512, max_sequences=24)
    scheduler = Scheduler(config, pool, time.monotonic, drafts=DraftDepth(3, automatic=True))
    runner = Runner(model, 96, collectives=SingleRank(), drafts=True, ahead=True)
    runner.warm_up(512, 24, 600, 3)
    runner.prepare_decodes(24, 600, (0, 1, 2, 3), capture=True)
    runner.use_chunk_steps(Captured(), rows=24, tokens=600, depths=(0, 1, 2, 3), chunks=(128, 256)).prepare()
    requests: dict[int, Request] = {}
    outputs: dict[int, list[int]] = {}
    reasons: dict[int, FinishReason] = {}
    open_handles: set[int] = set()
    flight: deque[tuple[StepPlan, Launched]] = deque()
    began, steps = time.monotonic(), 0
    while (asking := time.monotonic() < began + SECONDS or steps < STEPS) or open_handles or flight:
        while asking and len(open_handles) < 40:
            request = a_request(len(requests), chance, text)
            requests[request.handle], outputs[request.handle] = request, []
            open_handles.add(request.handle)
            scheduler.add(request)
        if chance.random() < 0.02 and open_handles:
            scheduler.abort(chance.choice(sorted(open_handles)))
        plan = scheduler.schedule()
        if plan is not None:
            flight.append((plan, runner.launch(plan)))
        if len(flight) > (plan is not None):
            done, launched = flight.popleft()
            scheduler.commit(done, launched.output())
            scheduler.took(done, 0.001)
            steps += 1
        outcome = scheduler.take_outcome()
        for row in outcome.tokens:
            if row.choice == 0:
                outputs[row.handle] += row.tokens
        for one in outcome.ends:
            if one.last:
                open_handles.discard(one.handle)
                reasons[one.handle] = one.reason
    scheduler.check_integrity()
    assert pool.num_available == 96
    took, aborted = time.monotonic() - began, list(reasons.values()).count(FinishReason.ABORT)
    tokens = sum(map(len, outputs.values()))
    print(f"{steps} steps, {len(reasons)} requests, {aborted} of them aborted, {tokens} tokens in {took:.0f} s")
    lengths = {handle for handle, reason in reasons.items() if reason is FinishReason.LENGTH}
    assert all(len(outputs[handle]) == requests[handle].sampling.max_tokens for handle in lengths)
    reference = load_model(TINY)
    greedy = [handle for handle in sorted(lengths) if requests[handle].sampling == plain(requests[handle].sampling)]
    assert len(greedy) > CHECKED
    for handle in chance.sample(greedy, CHECKED):
        assert flips(reference, requests[handle].prompt, outputs[handle], bound=0.3) == 0


def plain(sampling: Sampling) -> Sampling:
    return Sampling(max_tokens=sampling.max_tokens, ignore_eos=True)
