"""Engine processes that draft, plan steps ahead and constrain outputs say what one model says step by step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from katydid.engine.v1 import engine_pb2 as pb
from katydid_engine.loader import load_model

from tests.engine.engine_process import Answer, engine, session
from tests.engine.test_engine_process import run
from tests.engine.test_runner import generate, requests
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("plan", ["single", "tp2"])
def test_the_same_tokens_over_the_wire(plan: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = write_tiny_model(tmp_path / "mtp", "hy_v3", num_nextn_predict_layers=1)
    wanted = generate(load_model(folder), requests())
    options = ["--mtp=2", "--async-scheduling=on", "--kv-pages=24", "--max-model-tokens=600", f"--plan={plan}"]
    answers: dict[int, Answer] = {}

    async def ask_all(address: str) -> None:
        async with session(address) as client:
            for request in requests():
                sampling = request.sampling
                fields = {
                    name: getattr(sampling, name)
                    for name in ("seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens",
                                 "presence_penalty", "frequency_penalty", "min_tokens", "n", "ignore_eos", "logprobs")
                    if getattr(sampling, name) is not None
                }  # fmt: skip
                fields |= {"logit_bias": dict(sampling.logit_bias), "stop_token_ids": sampling.stop_token_ids}
                answers[request.handle] = client.submit(request.prompt, **fields)
            aborted = client.submit([5] * 100, max_tokens=400, ignore_eos=True)
            await asyncio.gather(*(answer.done.wait() for answer in answers.values()))
            client.send(abort=pb.AbortRequest(request=len(client.answers)))
            await asyncio.wait_for(aborted.done.wait(), 30)
            regex = pb.Grammar(regex="[a-c]{3,9}-x")
            constrained = await client.generate([1, 2, 3], grammar=regex, max_tokens=40, temperature=1.0)
            assert constrained.end.reason in (pb.FINISH_REASON_GRAMMAR, pb.FINISH_REASON_STOP)

    with engine(folder, tmp_path, *options) as service:
        run(ask_all(service.address))
    for request in requests():
        for choice in range(request.sampling.n):
            assert answers[request.handle].tokens[choice] == wanted[request.handle, choice]
    ends = [end for answer in answers.values() for end in answer.ends.values()]
    assert sum(end.draft_tokens for end in ends) > 0
    assert all(end.accepted_tokens <= end.draft_tokens for end in ends)
