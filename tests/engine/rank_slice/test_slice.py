"""Slices of every kind of plan run through the engine's runner on a host; what they are made of is right."""

from __future__ import annotations

import pytest
import torch
from katydid_engine.layers.experts import Fp8Experts
from katydid_engine.matrices import PlainMatrix, read_matrix
from katydid_engine.parallel import ParallelPlan
from katydid_engine.planning.measured import measured
from katydid_engine.quantization import Scheme, StoredQuantization
from katydid_engine.rank_slice.build import SliceOptions
from katydid_engine.rank_slice.measure import measure_prompt, measure_step, step_traffic
from katydid_engine.rank_slice.steps import Decoding, SliceSteps
from katydid_engine.rank_slice.synthetic_weights import SyntheticWeights
from katydid_engine.sparse_prefill import SparsePrefill
from katydid_engine.weights import Weights
from katydid_runtime.errors import SettingsError

from tests.engine.rank_slice.small import CONFIG, small_slice

LINKS = measured("h200")


@pytest.mark.parametrize(
    ("plan", "rank", "dtype"),
    [
        ("tp8", 0, "fp8"),
        ("tp2", 1, "bf16"),
        ("tp8,sp", 7, "fp8"),
        ("tp2,sp,ep2,fp8", 1, "fp8"),
        ("dp4ep4", 3, "fp8"),
        ("dp2ep2", 0, "w4a8"),
    ],
)
def test_prompts_and_steps(plan: str, rank: int, dtype: str) -> None:
    steps = SliceSteps(small_slice(plan, rank, dtype), 512)
    prompt = measure_prompt(steps, 150, 64, LINKS, sparse=None, repeats=1, phases=False)
    assert (
        prompt.name == f"{ParallelPlan.parse(plan)} rank {rank}, {dtype}, fp8 KV: prefill of 150 tokens in chunks of 64"
    )
    assert prompt.seconds > prompt.floor > 0
    traffic = step_traffic(steps, 3, 100, LINKS)
    step = measure_step(steps, 3, 100, traffic, repeats=2, phases=False)
    assert step.gained == 3
    assert step.row()["tokens_per_s"] == pytest.approx(3 / step.seconds)
    assert step.traffic
    assert step.links_s > 0


def test_what_a_step_sends() -> None:
    """Of two layers: two sums each, the embedding's, and that of the sampled tokens; logits are gathered."""
    traffic = step_traffic(SliceSteps(small_slice("tp2"), 512), 3, 64, LINKS)
    hidden = 3 * 64 * 4
    sent = 5 * hidden + 3 * 4
    assert traffic["tp all_reduce"]["calls"] == 6
    assert traffic["tp all_reduce"]["sent_bytes"] == sent
    assert traffic["tp all_gather"]["sent_bytes"] == 3 * 128 * 4
    seconds = 6 * LINKS["nvlink_s"] + sent / LINKS["nvlink_bytes_per_s"]
    assert traffic["tp all_reduce"]["modelled_s"] == pytest.approx(seconds)


def test_sequences_keep_growing_with_drafts() -> None:
    steps = SliceSteps(small_slice("single", mtp=True), 1024, drafts=1)
    decoding = Decoding(steps, 2, 100)
    decoding.run(4)
    decoding.end()
    # Five steps of one token at least and two at most.
    assert 200 + 2 * 5 <= decoding.tokens <= 200 + 2 * 10


def test_sparse_prompts_are_told_apart() -> None:
    rank_slice = small_slice("tp2")
    sparse = SparsePrefill(budget=0.25, min_tokens=64, dense_layers=1)
    rank_slice.model.use_sparse_prefill(sparse)
    steps = SliceSteps(rank_slice, 1024)
    found = measure_prompt(steps, 512, 256, LINKS, sparse=sparse, repeats=1, phases=False)
    assert found.name.endswith("25% of its blocks, 1 dense layers")
    by_rule = measure_prompt(steps, 512, 256, LINKS, sparse=SparsePrefill(rule="paper"), repeats=1, phases=False)
    assert by_rule.name.endswith("100% of its blocks by the paper rule")


def test_weights_are_quantised_as_stored_and_spread() -> None:
    rank_slice = small_slice("tp2")
    block = rank_slice.model._layers[1].feed_forward
    experts = block._experts
    assert isinstance(experts, Fp8Experts)
    w13 = experts.slots[0].float()
    assert experts.slots[0].dtype == torch.float8_e4m3fn
    # Four deviations fill the range, and no two experts are the same.
    assert 100 < w13.std() < 125
    assert w13[0].ne(w13[1]).float().mean() > 0.9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 8}, "rank=8, expected 0 to 7"),
        ({"dtype": "int8"}, "dtype='int8', expected bf16, fp8, w4a8"),
        ({"kv": "int4"}, "kv='int4', expected bf16, fp8"),
        ({"plan": ParallelPlan(tp=2, pp=2)}, "no pp"),
    ],
)
def test_what_cannot_be_built(change: dict, message: str) -> None:
    arguments = {"config": CONFIG, "plan": ParallelPlan(tp=8), "device": torch.device("cpu")} | change
    with pytest.raises(SettingsError, match=message):
        SliceOptions(**arguments)


@pytest.mark.parametrize("scheme", list(Scheme))
def test_weights_have_no_mean(scheme: Scheme) -> None:
    """Otherwise hidden states of all tokens come to look alike, and choose the same experts."""
    config = StoredQuantization(scheme)
    source = SyntheticWeights(torch.device("cpu"), torch.float32, scheme, pool=1 << 16)
    weights = Weights(source, torch.device("cpu"), torch.float32, quantization=config)
    matrix = read_matrix(weights.scope("q_proj"), (128, 256), (slice(0, 128), slice(0, 256)), row_scales=False)
    values = matrix.weight if isinstance(matrix, PlainMatrix) else matrix.dequantised()
    deviation = values.std().item()
    assert deviation == pytest.approx(0.02, rel=0.05)
    assert abs(values.mean().item()) < 5 * deviation / values.numel() ** 0.5
