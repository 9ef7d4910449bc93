"""The sampler's kernels give the reference's tokens, whichever way a row takes through them; on a GPU also chi-square.

A few draws in a million may differ where a token's mass lies within rounding of what top-p asks for.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from katydid_kernels import LogitBias, Penalties, SamplingBatch, sample_reference
from katydid_kernels.sample.candidates import CANDIDATES
from katydid_kernels.sample.launch import SampleScratch, launch_logprobs, launch_sample
from torch import Tensor

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# One tile and a piece of another; groups of the last are partly empty.
VOCAB = 4999
gpu = pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU")


def batch_of(rows: int, seed: int = 0, **fields: float) -> SamplingBatch:
    return SamplingBatch(
        temperature=torch.full((rows,), fields.get("temperature", 1.0), device=DEVICE),
        top_k=torch.full((rows,), int(fields.get("top_k", 0)), dtype=torch.int32, device=DEVICE),
        top_p=torch.full((rows,), fields.get("top_p", 1.0), device=DEVICE),
        min_p=torch.full((rows,), fields.get("min_p", 0.0), device=DEVICE),
        seeds=torch.arange(rows, device=DEVICE) * 7919 - 3 + seed,
        positions=torch.arange(rows, dtype=torch.int32, device=DEVICE) * 5,
    )


def joined(*batches: SamplingBatch) -> SamplingBatch:
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    return SamplingBatch(*(torch.cat([getattr(batch, name) for batch in batches]) for name in names))


def logits_of(rows: int, vocab: int = VOCAB, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, vocab, generator=generator) * spread).to(DEVICE)


def launched(logits: Tensor, batch: SamplingBatch) -> list[int]:
    return launch_sample(logits, batch, overlap=False, chain=ON_GPU).tolist()


FEW = (
    {"temperature": 0.0}, {}, {"top_k": 1}, {"top_k": 50}, {"top_p": 0.5}, {"min_p": 0.05, "temperature": 0.7},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 1.3}, {"top_k": 10**6},
)  # fmt: skip
MANY = ({"top_p": 0.95, "temperature": 3.0}, {"top_k": 900, "top_p": 0.8, "temperature": 3.0}, {"top_k": 900})


def test_rows_of_every_kind_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """In programs of one tile, as a small batch has them where there are more SMs."""
    launches = importlib.import_module("katydid_kernels.sample.launch")
    monkeypatch.setattr(launches, "tiles_a_program", lambda rows, tiles, sms: 1)
    batch = joined(*(batch_of(1, seed, **fields) for seed, fields in enumerate((*FEW, *MANY))))
    logits = logits_of(len(FEW) + len(MANY))
    assert launched(logits, batch) == sample_reference(logits, batch).tolist()


def test_everything_at_once() -> None:
    rows, drafts = 4, 2
    generator = torch.Generator().manual_seed(9)

    def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=dtype).to(DEVICE)

    def floats(low: float, high: float) -> Tensor:
        return (torch.rand(rows, generator=generator) * (high - low) + low).to(DEVICE)

    logits = logits_of(rows).to(torch.bfloat16)
    likely = logits.float().topk(40, dim=-1).indices.int()
    seen = ints(0, 4, 3, VOCAB, dtype=torch.int16) * (ints(0, 9, 3, VOCAB) == 0).to(torch.int16)
    seen -= (ints(0, 9, 3, VOCAB) == 0).to(torch.int16) * torch.tensor(-(1 << 15), dtype=torch.int16, device=DEVICE)
    pending = likely[:, 3 : 3 + drafts].clone()
    pending[1::2, 1] = -1
    values = torch.full((rows, 3), -torch.inf)
    values[:, 1] = 4.0
    allowed = ints(-(2**31), 2**31 - 1, rows, -(-VOCAB // 32))
    batch = replace(
        joined(*(batch_of(1, seed, top_k=30, top_p=0.9, min_p=0.02, temperature=0.8) for seed in range(rows))),
        penalties=Penalties(
            torch.tensor([0, -1, 2, 1], dtype=torch.int32, device=DEVICE), floats(0.8, 1.6), floats(-1, 1),
            floats(-1, 1), seen, pending,
        ),
        bias=LogitBias(
            torch.arange(0, 3 * rows + 1, 3, dtype=torch.int32, device=DEVICE),
            torch.stack((likely[:, 0], likely[:, 39], likely[:, 2]), 1).flatten(), values.flatten().to(DEVICE),
        ),
        allowed=allowed,
    )  # fmt: skip
    assert launched(logits, batch) == sample_reference(logits, batch).tolist()
    greedy = replace(batch, temperature=torch.zeros(rows, device=DEVICE))
    assert launched(logits, greedy) == sample_reference(logits, greedy).tolist()
    plain = replace(
        batch,
        top_k=torch.zeros_like(batch.top_k),
        top_p=torch.ones(rows, device=DEVICE),
        min_p=values.new_zeros(rows).to(DEVICE),
    )
    assert launched(logits, plain) == sample_reference(logits, plain).tolist()


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"top_k": 600}, {"top_k": 3}, {"top_p": 0.4}], ids=str)
def test_equals_go_by_id(fields: dict[str, float]) -> None:
    """More equals than candidates have room for, and equals of the k-th."""
    logits = (logits_of(3) * 0.3).round()
    assert int((logits == logits.amax(1, keepdim=True)).sum()) > 3 and CANDIDATES < 600  # noqa: PT018
    batch = batch_of(3, **fields)
    assert launched(logits, batch) == sample_reference(logits, batch).tolist()


def test_top_p_is_of_what_top_k_leaves_whatever_min_p_drops() -> None:
    batch = batch_of(3, top_k=200, top_p=0.3, min_p=0.3, temperature=2.0)
    logits = logits_of(3)
    assert launched(logits, batch) == sample_reference(logits, batch).tolist()


def test_banned_rows_and_empty_batches() -> None:
    logits = torch.full((3, 70), -torch.inf, device=DEVICE)
    logits[1, 69] = 0.0
    logits[2, 3:5] = -5.0
    for fields in ({}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}):
        batch = batch_of(3, **fields)
        tokens = launched(logits, batch)
        assert tokens[:2] == [0, 69]
        assert tokens == sample_reference(logits, batch).tolist()
    assert launched(torch.empty(0, 70, device=DEVICE), batch_of(0)) == []


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy in the interpreter, of inf - inf
@pytest.mark.parametrize("find", ["kernel", "reference"])
def test_what_is_no_number_is_told(find: str) -> None:
    """Wherever it stands in a row; and into memory that is there already."""
    logits = logits_of(6)
    logits[1, VOCAB - 1] = float("nan")
    logits[2, 0] = float("inf")
    logits[3] = float("-inf")
    logits[4, 77] = float("-inf")
    logits[5] = float("nan")
    batch = joined(*(batch_of(1, **fields) for fields in (FEW[0], FEW[1], FEW[3], FEW[4], FEW[6], FEW[5])))
    sound = torch.zeros(6, dtype=torch.bool, device=DEVICE)
    if find == "reference":
        sample_reference(logits, batch, sound=sound)
    else:
        out, scratch = batch.top_k.clone(), SampleScratch.allocate(9, VOCAB, logits.device)
        tokens = launch_sample(logits, batch, overlap=False, chain=ON_GPU, out=out, sound=sound, scratch=scratch)
        assert tokens is out
        assert all(0 <= token < VOCAB for token in tokens.tolist())
        assert tokens.tolist()[::4] == sample_reference(logits, batch).tolist()[::4]
    assert sound.tolist() == [True, False, False, False, True, False]


@pytest.mark.gpu
@gpu
def test_what_is_no_number_gives_a_token_of_the_vocabulary() -> None:
    logits = torch.full((1, 70), float("nan"), device=DEVICE)
    for fields in FEW:
        assert 0 <= launched(logits, batch_of(1, **fields))[0] < 70


@pytest.mark.parametrize(("vocab", "num_top", "grain"), [(70, 0, 0.0), (VOCAB, 20, 0.0), (VOCAB, 5, 20.0), (9, 9, 0.0)])
def test_logprobs(vocab: int, num_top: int, grain: float) -> None:
    logits = logits_of(2, vocab)
    if grain:
        logits = (logits / grain).round() * grain
    tokens = torch.tensor([0, vocab - 1], dtype=torch.int32, device=DEVICE)
    found = launch_logprobs(logits, tokens, num_top, chain=ON_GPU)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(found.chosen.double(), expected[[0, 1], tokens.long()], atol=3e-6, rtol=0)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    assert found.top_ids.tolist() == order.tolist()
    torch.testing.assert_close(found.top.double(), expected.gather(1, order), atol=3e-6, rtol=0)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("fields", [*FEW, *MANY], ids=str)
def test_a_whole_vocabulary(fields: dict[str, float]) -> None:
    for rows in (1, 64, 512):
        logits = logits_of(rows, 120832)
        batch = batch_of(rows, **fields)
        differing = torch.tensor(launched(logits, batch)).cuda() != sample_reference(logits, batch)
        assert int(differing.sum()) <= rows // 256, differing.nonzero()
        assert launched(logits[:1], joined(batch_of(1, **fields))) == launched(logits, batch)[:1]


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(
    ("fields", "kept"), [({}, 8), ({"top_k": 3}, 3), ({"top_p": 0.7}, 3), ({"min_p": 0.25}, 4)], ids=str
)
def test_a_million_draws_by_chi_square(fields: dict[str, float], kept: int) -> None:
    probabilities = torch.tensor([0.36, 0.25, 0.14, 0.1, 0.06, 0.05, 0.03, 0.01], dtype=torch.float64)
    rows, draws = 4000, 250
    counts = torch.zeros(8, dtype=torch.float64)
    logits = probabilities.log().float().cuda().expand(rows, -1)
    for draw in range(draws):
        tokens = launch_sample(logits, batch_of(rows, draw * 10**9, **fields), overlap=False)
        counts += tokens.cpu().bincount(minlength=8).double()
    expected = probabilities[:kept] / probabilities[:kept].sum() * rows * draws
    assert counts[kept:].sum() == 0
    statistic = ((counts[:kept] - expected).square() / expected).sum().item()
    # Wilson-Hilferty: 4.5 standard deviations of a chi-square of kept - 1 degrees of freedom.
    freedom = kept - 1
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4.5 * (2 / (9 * freedom)) ** 0.5) ** 3
