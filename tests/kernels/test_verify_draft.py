"""Verification against a scalar definition, and that what is accepted is what decoding one by one samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_kernels import Sampled, SamplingBatch, sample, seen_tokens, verify_draft, verify_draft_reference
from katydid_kernels.verify_draft import launch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def int32(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def by_definition(sampled: list[int], drafts: list[int], limit: int) -> int:
    count = 0
    while count < min(limit, len(drafts)) and sampled[count] == drafts[count]:
        count += 1
    return count + 1


@pytest.mark.parametrize("width", [1, 2, 4])
def test_kernel_and_reference_equal_the_definition(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    rows, vocab = 40, 3
    sampled = torch.randint(0, vocab, (rows, width), generator=generator, dtype=torch.int32)
    drafts = torch.randint(-1, vocab, (rows, width - 1), generator=generator, dtype=torch.int32)
    limits = torch.randint(0, width, (rows,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(rows, generator=generator).int()
    slots[::7] = -1
    history = torch.randint(0, vocab, (rows, 9), generator=generator, dtype=torch.int32)
    seen = torch.stack([seen_tokens(row[:3], row[3:], vocab) for row in history])
    seen[3, :] = 0x7FFF  # as often as can be counted
    moved = [tensor.to(DEVICE) for tensor in (sampled, drafts, limits, slots)]
    of_kernel, of_reference = seen.to(DEVICE), seen.clone()
    found = launch(*moved, of_kernel)
    assert torch.equal(found.cpu(), verify_draft(sampled, drafts, num_drafts=limits, slots=slots, seen=of_reference))
    accepted = [by_definition(*row) for row in zip(sampled.tolist(), drafts.tolist(), limits.tolist(), strict=True)]
    assert found.tolist() == accepted
    assert torch.equal(of_kernel.cpu(), of_reference)
    for row, (slot, count) in enumerate(zip(slots.tolist(), accepted, strict=True)):
        if slot >= 0 and slot != 3:
            output = torch.cat((history[slot, 3:], sampled[row, :count]))
            assert torch.equal(of_reference[slot], seen_tokens(history[slot, :3], output, vocab))
    assert (of_reference[3] == 0x7FFF).all()


@pytest.mark.parametrize("find", [launch, verify_draft_reference])
def test_what_the_next_step_reads_is_left_in_its_place(find: Callable[..., Tensor]) -> None:
    rows, width = 5, 3
    sampled = torch.arange(rows * width, dtype=torch.int32, device=DEVICE).view(rows, width)
    drafts = sampled[:, :2].clone()
    drafts[2, 0] = -1
    positions = torch.arange(100, 100 + 4 * rows, dtype=torch.int32, device=DEVICE)[::4]
    nothing = torch.full((8, 4), -7, dtype=torch.int32, device=DEVICE)
    left = Sampled(nothing.clone(), nothing[:, 0].clone(), nothing[:, 0].clone())
    found = find(sampled, drafts, num_drafts=None, slots=None, seen=None, first_positions=positions, left=left)
    assert found.data_ptr() == left.accepted.data_ptr()
    assert found.tolist() == [3, 3, 1, 3, 3]
    assert torch.equal(left.tokens[:rows, :width], sampled)
    assert torch.equal(left.first_positions[:rows], positions)
    untouched = (left.tokens[rows:], left.tokens[:, width:], left.accepted[rows:], left.first_positions[rows:])
    assert all(bool((part == -7).all()) for part in untouched)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.integers(1, 4), temperature=st.sampled_from([0.0, 0.5, 1.5]))
def test_accepted_tokens_are_those_of_decoding_one_by_one(seed: int, depth: int, temperature: float) -> None:
    """A language of random logits by last token: drafts from anywhere, the sequence stays the same."""
    vocab, length = 5, 12
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(vocab, vocab, generator=generator)

    def draw(last: Tensor, positions: Tensor) -> Tensor:
        rows = len(last)
        batch = SamplingBatch(
            torch.full((rows,), temperature), torch.zeros(rows, dtype=torch.int32), torch.ones(rows),
            torch.zeros(rows), torch.full((rows,), seed % 1000), positions.int(),
        )  # fmt: skip
        return sample(table[last.long()], batch)

    plain = [0]
    for position in range(1, length):
        plain += draw(torch.tensor(plain[-1:]), torch.tensor([position])).tolist()
    tokens, steps = [0], 0
    while len(tokens) < length:
        drafts = torch.randint(0, vocab, (1, depth), generator=generator, dtype=torch.int32)
        fed = torch.cat((torch.tensor(tokens[-1:]), drafts[0]))
        sampled = draw(fed, len(tokens) + torch.arange(depth + 1))[None]
        tokens += sampled[0, : int(verify_draft(sampled, drafts)[0])].tolist()
        steps += 1
    assert tokens[:length] == plain
    assert steps < length


def test_acceptance_is_the_targets_probability_of_the_draft() -> None:
    rows, probabilities = 40_000, torch.tensor([0.5, 0.3, 0.2])
    batch = SamplingBatch(
        torch.ones(rows), torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows),
        torch.arange(rows), torch.zeros(rows, dtype=torch.int32),
    )  # fmt: skip
    first = sample(probabilities.log().expand(rows, -1), batch)
    sampled = torch.stack((first, first), 1)
    for draft, probability in enumerate(probabilities.tolist()):
        accepted = verify_draft(sampled, torch.full((rows, 1), draft, dtype=torch.int32)) - 1
        assert abs(float(accepted.float().mean()) - probability) < 4.5 * (probability * (1 - probability) / rows) ** 0.5


def test_what_does_not_fit_is_named() -> None:
    sampled = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"drafts must be \[2, 2\], got \[2, 3\]"):
        verify_draft(sampled, sampled)
    with pytest.raises(ValueError, match="drafts must be int32"):
        verify_draft(sampled, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="slots and seen must be given together"):
        verify_draft(sampled, sampled[:, :2], slots=sampled[:, 0])
    with pytest.raises(ValueError, match="first_positions and left must be given together"):
        verify_draft(sampled, sampled[:, :2], first_positions=sampled[:, 0])
    small = Sampled(sampled[:1], sampled[:, 0], sampled[:, 0])
    with pytest.raises(ValueError, match=r"left.tokens must be at least \[2, 3\], got \[1, 3\]"):
        verify_draft(sampled, sampled[:, :2], first_positions=sampled[:, 0], left=small)
