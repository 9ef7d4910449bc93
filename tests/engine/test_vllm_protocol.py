"""The engine under `vllm.grpc.engine.VllmEngine`: the same tokens as under its own protocol, and the same manners."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from katydid.engine.v1 import engine_pb2 as pb
from katydid_engine.submission import EngineLimits
from katydid_engine.vllm_protocol.answers import Answer
from katydid_engine.vllm_protocol.requests import submission
from katydid_engine.vllm_protocol.steps import Step
from katydid_runtime.block_hash import unpack_ids
from katydid_runtime.errors import InvalidRequestError, UnsupportedError
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from tests.engine.engine_process import Service, SessionClient, engine
from tests.tiny_model import EOS_ID, VOCAB_SIZE, write_tiny_model

PROMPT = [11, 12, 13, 14, 15] * 4
LIMITS = EngineLimits(b"i" * 32, VOCAB_SIZE, 1000, 8, 5, 2)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("vllm")
    model = write_tiny_model(folder / "tiny")
    with engine(model, folder, "--vllm-protocol", "--model-name", "tiny") as running:
        assert running.address
        yield running


@asynccontextmanager
async def stub_of(served: Service) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(served.address) as channel:
        yield VllmEngineStub(channel)


def run(served: Service, body: Callable[[Any], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with stub_of(served) as stub:
            await asyncio.wait_for(body(stub), 60)

    asyncio.run(scenario())


def asked(name: str, *, stream: bool = True, **sampling: Any) -> vllm.GenerateRequest:
    params = vllm.SamplingParams(**{"temperature": 0.7, "seed": 3, "max_tokens": 20, "ignore_eos": True} | sampling)
    tokenized = vllm.TokenizedInput(input_ids=PROMPT)
    return vllm.GenerateRequest(request_id=name, tokenized=tokenized, sampling_params=params, stream=stream)


async def collected(stub: Any, request: vllm.GenerateRequest) -> tuple[dict[int, list[int]], dict[int, Any]]:
    """Streamed ids by choice, and the last message of each."""
    ids: dict[int, list[int]] = {}
    ends: dict[int, Any] = {}
    async for response in stub.Generate(request):
        if response.HasField("chunk"):
            assert response.chunk.index not in ends
            ids.setdefault(response.chunk.index, []).extend(response.chunk.token_ids)
            assert response.chunk.completion_tokens == len(ids[response.chunk.index])
        else:
            ends[response.complete.index] = response.complete
    return ids, ends


def test_it_says_what_the_own_protocol_says(served: Service) -> None:
    async def body(stub: Any) -> None:
        streamed, ends = await collected(stub, asked("s"))
        _, whole = await collected(stub, asked("w", stream=False))
        assert streamed[0] == list(whole[0].output_ids)
        assert (ends[0].finish_reason, ends[0].completion_tokens, ends[0].prompt_tokens) == ("length", 20, len(PROMPT))
        async with grpc.aio.insecure_channel(served.address) as channel:
            client = SessionClient(channel)
            await client.open()
            own = await client.generate(PROMPT, seed=3, temperature=0.7, max_tokens=20, ignore_eos=True)
            await client.break_off()
        assert own.output == streamed[0]

    run(served, body)


def test_choices_logprobs_and_stop_tokens(served: Service) -> None:
    async def body(stub: Any) -> None:
        ids, ends = await collected(stub, asked("n", n=3))
        assert sorted(ends) == [0, 1, 2]
        assert len({tuple(ids[choice]) for choice in ids}) > 1
        _, whole = await collected(stub, asked("l", stream=False, logprobs=2, prompt_logprobs=1))
        output, prompt = whole[0].output_logprobs, whole[0].input_logprobs
        assert list(output.token_ids) == list(whole[0].output_ids)
        assert [len(top.values) for top in output.top_logprobs] == [2] * 20
        assert not prompt.token_logprobs[0].HasField("value")
        assert len(prompt.token_logprobs) == len(prompt.token_ids) == len(PROMPT)
        third = ids[0][2]
        stopped, ends = await collected(stub, asked("t", stop_token_ids=[third]))
        assert stopped[0][-1] == third
        assert (ends[0].finish_reason, ends[0].matched_token_id) == ("stop", third)
        responses = [response async for response in stub.Generate(asked("f", logprobs=1, prompt_logprobs=0))]
        first = [response.chunk for response in responses if response.HasField("chunk")]
        assert first[0].HasField("input_logprobs")
        assert not any(chunk.HasField("input_logprobs") for chunk in first[1:])
        assert sum(len(chunk.output_logprobs.token_ids) for chunk in first) == 20

    run(served, body)


def test_log_probabilities_of_a_long_prompt_are_joined() -> None:
    """They come with each chunk of its prefill, and go out once."""
    chosen = [-float(token) for token in PROMPT[1:]]
    parts = [
        Step(
            logprobs=[
                pb.TokenLogprobs(
                    prompt=True,
                    chosen=array("f", part).tobytes(),
                    top=1,
                    top_tokens=array("I", [9] * len(part)).tobytes(),
                    top_logprobs=array("f", part).tobytes(),
                )
            ]
        )
        for part in (chosen[:8], chosen[8:])
    ]
    end = Step({0: [1]}, finishes=[pb.Finish(reason=pb.FINISH_REASON_LENGTH)])
    for stream in (False, True):
        answer = Answer(pb.SubmitRequest(prompt_ids=array("I", PROMPT).tobytes()), stream=stream)
        sent = [response for step in (*parts, end) for response in answer.responses(step)]
        told = sent[0].chunk.input_logprobs if stream else sent[0].complete.input_logprobs
        assert [entry.value for entry in told.token_logprobs[1:]] == chosen
        assert not told.token_logprobs[0].HasField("value")
        assert len(told.top_logprobs) == len(told.token_ids) == len(PROMPT)
        assert len(sent) == 1 + stream


def test_an_abort_ends_a_request_and_a_caller_that_leaves_leaves_nothing(served: Service) -> None:
    async def body(stub: Any) -> None:
        async def aborted() -> Any:
            return await collected(stub, asked("a", max_tokens=3000))

        running = asyncio.create_task(aborted())
        while not (await stub.GetServerInfo(vllm.GetServerInfoRequest())).active_requests:
            await asyncio.sleep(0.01)
        await stub.Abort(vllm.AbortRequest(request_ids=["a", "nobody"]))
        _, ends = await running
        assert ends[0].finish_reason == "abort"
        call = stub.Generate(asked("left", max_tokens=3000))
        await call.read()
        call.cancel()
        while (await stub.GetServerInfo(vllm.GetServerInfoRequest())).active_requests:
            await asyncio.sleep(0.01)

    run(served, body)


def test_what_it_is_asked_about_the_model(served: Service) -> None:
    async def body(stub: Any) -> None:
        info = await stub.GetModelInfo(vllm.GetModelInfoRequest())
        assert (info.served_model_name, info.is_generation, info.vocab_size) == ("tiny", True, VOCAB_SIZE)
        assert (list(info.eos_token_ids), info.model_type) == ([EOS_ID], "llama")
        assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
        parts = [part async for part in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        packed = b"".join(part.data for part in parts)
        assert [part.sha256 for part in parts] == ["", *[""] * (len(parts) - 2), hashlib.sha256(packed).hexdigest()][
            -len(parts) :
        ]
        assert {"tokenizer.json", "config.json"} <= set(zipfile.ZipFile(io.BytesIO(packed)).namelist())
        loads = await stub.GetLoads(vllm.GetLoadsRequest())
        assert (loads.dp_rank_count, len(loads.loads)) == (1, 1)
        assert loads.loads[0].max_total_num_tokens > 0

    run(served, body)


def test_what_it_does_not_do_is_refused_by_name(served: Service) -> None:
    async def body(stub: Any) -> None:
        async def status(call: Any) -> tuple[grpc.StatusCode, str]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            return caught.value.code(), caught.value.details() or ""

        code, text = await status(stub.Generate(vllm.GenerateRequest(request_id="x", text="hello")).read())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "token ids" in text
        code, _ = await status(stub.Generate(asked("x", temperature=9.0)).read())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        code, text = await status(stub.Generate(asked("x", n=2**32 - 1), timeout=5).read())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "sampling.n" in text
        code, text = await status(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read())
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert "SubscribeKvEvents" in text
        assert (await status(stub.FlushCache(common_pb2.FlushCacheRequest())))[0] is grpc.StatusCode.UNIMPLEMENTED

    run(served, body)


def test_unset_numbers_are_defaults() -> None:
    message = submission(
        vllm.GenerateRequest(request_id="r", tokenized=vllm.TokenizedInput(input_ids=[1, 2])), LIMITS, 1
    )
    assert unpack_ids(message.prompt_ids).tolist() == [1, 2]
    sampling = message.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty, sampling.n) == (1, 1, 1, 1)
    assert (sampling.max_tokens, message.dp_rank, sampling.HasField("logprobs")) == (998, 1, False)
    assert not sampling.HasField("grammar")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"logprobs": -1}, UnsupportedError),
        ({"truncate_prompt_tokens": 5}, UnsupportedError),
        ({"logit_bias": {-4: 1.0}}, InvalidRequestError),
    ],
)
def test_what_cannot_be_done_is_said(fields: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        submission(asked("x", **fields), LIMITS, 0)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"json_object": True}, pb.Grammar(json_schema='{"type": "object"}')),
        ({"regex": "a+"}, pb.Grammar(regex="a+")),
        ({"grammar": "root ::= 'a'"}, pb.Grammar(ebnf="root ::= 'a'")),
        ({"structural_tag": "{}"}, pb.Grammar(structural_tag="{}")),
        (
            {"choice": vllm.ChoiceConstraint(choices=["a", "b"])},
            pb.Grammar(choice=pb.ChoiceGrammar(choices=["a", "b"])),
        ),
    ],
)
def test_constraints_are_grammars(fields: dict[str, Any], grammar: pb.Grammar) -> None:
    assert submission(asked("x", **fields), LIMITS, 0).sampling.grammar == grammar
