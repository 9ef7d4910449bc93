"""Decodes over tensors that never move: rows that fill a bucket up, and what an earlier step left there, change
nothing; on a GPU, graphs, drafts and steps ahead give tokens that the reference path gives."""

from __future__ import annotations

import contextlib
import functools
import itertools
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine import runner
from katydid_engine.collectives import SingleRank
from katydid_engine.decode_buffers import Bucket
from katydid_engine.decode_steps import Briefly, DecodeSteps, Uncaptured, row_buckets
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.plan import Run, SampleRow, Start, StepPlan
from katydid_engine.request import Request, Sampling
from katydid_engine.runner import Runner
from katydid_engine.sparse_prefill import SparsePrefill
from katydid_runtime.block_hash import ChainKey
from tokenizers import Tokenizer
from torch import Tensor

from tests.engine.test_runner import generate
from tests.tiny_model import write_tiny_model

TINY = Path(__file__).parents[2] / "models" / "hy3-tiny"


@given(st.integers(1, 600))
def test_every_number_of_rows_has_a_bucket(most: int) -> None:
    buckets = row_buckets(most)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == most
    assert all(larger <= max(2 * smaller, 32 + smaller) for smaller, larger in itertools.pairwise(buckets)), (
        "no step is padded to more than twice its rows, nor by more than 32"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderLM:
    torch.set_num_threads(1)
    return load_model(write_tiny_model(tmp_path_factory.mktemp("models") / "mtp", "hy_v3", num_nextn_predict_layers=1))


class Decoding:
    """Prompts of some lengths that decode with two drafts, step by step, in buckets of ``rows``."""

    def __init__(self, model: DecoderLM, lengths: list[int], rows: int, agreement: float | None = None) -> None:
        self.runner = Runner(model, 24, collectives=SingleRank(), drafts=True, ahead=True)
        self.steps = self.runner.use_decode_steps(Uncaptured(), rows=rows, tokens=256, depths=(2,), agreement=agreement)
        self.steps.prepare([Bucket(rows, 3, 2)])
        self.steps._rows = [rows]
        self._lengths = list(lengths)
        self._tokens = [0] * len(lengths)
        starts, runs = [], []
        for sequence, length in enumerate(lengths):
            prompt = array("I", [(7 * place + sequence) % 250 for place in range(length)])
            starts.append(Start(sequence, Sampling(temperature=0.9, seed=sequence, ignore_eos=True), length, prompt))
            runs.append(Run(sequence, 0, prompt, 0, array("I", range(3 * sequence, 3 * sequence + 3))))
        plan = StepPlan(0, starts=tuple(starts), runs=tuple(runs), samples=self._samples(len(runs)), drafts=2)
        self._take(plan)

    def step(self) -> Tensor:
        """Hidden states of the step's own rows."""
        runs = tuple(
            Run(sequence, self._lengths[sequence] - 1, array("I", [self._tokens[sequence]]), 3, array("I"))
            for sequence in range(len(self._lengths))
        )
        samples = self._samples(len(runs))
        self._take(StepPlan(1, runs=runs, num_decodes=len(runs), decode_q_len=3, samples=samples, drafts=2))
        (hidden,) = self.steps._hidden.values()
        return hidden[: 3 * len(runs)].clone()

    def _samples(self, rows: int) -> tuple[SampleRow, ...]:
        return tuple(SampleRow(row, 0) for row in range(rows))

    def _take(self, plan: StepPlan) -> None:
        for sequence, tokens in enumerate(self.runner.run(plan).tokens):
            self._lengths[sequence] += len(tokens)
            self._tokens[sequence] = tokens[-1]


def test_rows_that_fill_a_bucket_up_change_nothing(model: DecoderLM) -> None:
    lengths = [1, 63, 100]
    exact, padded = Decoding(model, lengths, 3), Decoding(model, lengths, 8)
    # What a larger step left behind.
    ints = padded.steps.buffers._ints
    for _ in range(6):
        ints.fill_(5)
        assert torch.equal(exact.step(), padded.step())
    for ours, theirs in zip(exact.runner.kv_cache.k_pages, padded.runner.kv_cache.k_pages, strict=True):
        assert torch.equal(ours, theirs), "rows that fill up write nowhere"


def test_a_bucket_is_prepared_without_rows(model: DecoderLM) -> None:
    """Numbers of another bucket would be taken for rows that there are not."""
    runner = Runner(model, 4, collectives=SingleRank(), drafts=True)
    pieces = Uncaptured()
    steps = runner.use_decode_steps(pieces, rows=6, tokens=128, depths=(0, 2))
    for bucket in steps.buckets:
        steps.buffers._ints.fill_(77777)
        steps.prepare([bucket])
        tensors = steps.buffers.bucket(bucket)
        assert (tensors.previous == -1).all()
        assert (tensors.built.inputs.slot_mapping == -1).all()
        for kind in ("forward", "choice"):
            pieces.run((kind, bucket))
    assert not any(pages.any() for pages in runner.kv_cache.k_pages)


def _noted(passed: list[int], index: int, steps: Callable[..., Any], *args: Any) -> Any:
    passed.append(index)
    return steps(*args)


class Brief(Uncaptured):
    """Does as `Captured` what is to be done before a graph is."""

    def prepare(
        self, key: tuple[str, Bucket], work: Callable[[], None], briefly: Briefly = contextlib.nullcontext
    ) -> None:
        with briefly():
            work()
        super().prepare(key, work, briefly)


def test_one_layer_of_each_kind_goes_before_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that launch other kernels, and nothing is left of it."""
    torch.set_num_threads(1)
    model = load_model(write_tiny_model(tmp_path / "six", "hy_v3", num_hidden_layers=6))
    passed: list[int] = []
    for index, layer in enumerate(model._layers):
        monkeypatch.setattr(layer, "steps", functools.partial(_noted, passed, index, layer.steps))
    runner = Runner(model, 4, collectives=SingleRank())
    pieces = Brief()
    steps = runner.use_decode_steps(pieces, rows=1, tokens=128)
    steps.prepare()
    assert passed == [0, 1], "a dense one, and the first with experts"
    model.use_sparse_prefill(SparsePrefill(dense_layers=4, min_tokens=1000))
    runner.use_chunk_steps(pieces, rows=1, tokens=128, chunks=(64,), sparse=True).prepare()
    assert passed[2:] == [0, 1, 4]
    passed.clear()
    pieces.run(("forward", steps.buckets[0]))
    assert passed == list(range(6))


def test_drafts_agree_as_often_as_told(model: DecoderLM) -> None:
    decoding = Decoding(model, [1, 63, 100], 3, agreement=0.7)
    before = sum(decoding._lengths)
    for _ in range(20):
        decoding.step()
    assert 60 * 2.0 < sum(decoding._lengths) - before < 60 * 2.4, "1 + 0.7 + 0.49 tokens a row"


def test_steps_of_other_kinds_have_no_bucket(model: DecoderLM) -> None:
    runner = Runner(model, 4, collectives=SingleRank(), drafts=True)
    steps: DecodeSteps = runner.use_decode_steps(Uncaptured(), rows=6, tokens=128, depths=(0, 2))
    assert steps.bucket(5, 1) == Bucket(6, 1, 0)
    assert steps.bucket(4, 3) == Bucket(4, 3, 2)
    assert steps.bucket(7, 1) is None, "more rows than any"
    assert steps.bucket(4, 2) is None, "a depth that is not used"
    assert [bucket.rows for bucket in steps.buckets] == [6, 4, 2, 1, 6, 4, 2, 1]


def prompts() -> list[array[int]]:
    ids = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(Path(__file__).read_text()).ids
    return [array("I", ids[start : start + length]) for start, length in ((0, 300), (50, 64), (9, 127), (400, 1))]


def flips(reference: DecoderLM, prompt: array[int], output: list[int], bound: float) -> int:
    """Greedy tokens that are not the reference's where its first two are further apart than ``bound``."""
    ids = [*prompt, *output]
    pages = list(range(-(-len(ids) // 64)))
    batch = ForwardBatch.pack([TokenRun(ids[:-1], 0, pages)])
    logits = reference.logits(reference.forward(batch, reference.new_kv_cache(len(pages)))[len(prompt) - 1 :])
    top = logits.topk(2, dim=-1)
    sure = top.values[:, 0] - top.values[:, 1] > bound
    return int((sure & (top.indices[:, 0] != torch.tensor(output))).sum())


@pytest.fixture(scope="module")
def reference() -> DecoderLM:
    return load_model(TINY)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [512, 100])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_on_a_gpu(reference: DecoderLM, graphs: bool, ahead: bool, drafts: int, chunk: int) -> None:
    """bf16 rounds a logit of this model by less than 0.15."""
    found = load_model(TINY, device="cuda", dtype=torch.bfloat16)
    requests = [
        Request(handle, prompt, ChainKey(b"m" * 32), Sampling(max_tokens=40, ignore_eos=True))
        for handle, prompt in enumerate(prompts())
    ]
    outputs = generate(found, requests, drafts=drafts, ahead=ahead, buckets=graphs, chunk=chunk)
    for request in requests:
        output = outputs[request.handle, 0]
        assert len(output) == 40
        assert flips(reference, request.prompt, output, bound=0.3) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 2])
def test_graphs_change_no_token(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    """Captured or not, over the same tensors; sampled rows, rows with penalties and limits beside them."""
    found = load_model(TINY, device="cuda", dtype=torch.bfloat16)
    samplings = [
        Sampling(max_tokens=40, ignore_eos=True, temperature=0.8, top_p=0.9, seed=1),
        Sampling(max_tokens=40, ignore_eos=True, temperature=1.0, top_k=20, min_p=0.02, seed=2),
        Sampling(max_tokens=20, ignore_eos=True, temperature=1.0, repetition_penalty=1.2, min_tokens=4, seed=3),
        Sampling(max_tokens=30, ignore_eos=True, logprobs=3),
    ]
    requests = [
        Request(handle, prompt, ChainKey(b"m" * 32), sampling)
        for handle, (prompt, sampling) in enumerate(zip(prompts(), samplings, strict=True))
    ]
    captured = generate(found, requests, drafts=drafts, ahead=True, buckets=True)
    monkeypatch.setattr(runner, "Captured", Uncaptured)
    assert generate(found, requests, drafts=drafts, ahead=True, buckets=True) == captured
    assert generate(found, requests, drafts=drafts, ahead=False, buckets=True) == captured
