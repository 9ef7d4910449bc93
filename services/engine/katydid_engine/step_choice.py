"""What a step samples, settles and drafts, op by op: for steps whose rows are of all kinds.

Every row is sampled at all its positions, `verify_draft` says how many of the samples are its own, and the draft layer
goes over the batch with the tokens that follow. Nothing here waits for the device: what depends on tokens that the host
must know first comes in as ``Settled``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from katydid_kernels import Sampled, verify_draft
from torch import Tensor

from katydid_engine.batch_builder import BuiltBatch
from katydid_engine.collectives import Collectives
from katydid_engine.drafting import DraftModel, draft_tokens, next_token_ids
from katydid_engine.host_copies import integers
from katydid_engine.kv_cache import KvCache
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.plan import Run, StepPlan
from katydid_engine.sampler import Row, sample_rows
from katydid_engine.seen_tokens import SeenTokens
from katydid_engine.sequence_sampler import Limits, SequenceSampler

__all__ = ["SampledStep", "Settled", "StepChoice", "row_limits"]


@dataclass(frozen=True, slots=True)
class Settled:
    """Of a decode, what the host knows of the row that it continues.

    Attributes:
        position: of the first token that the decode samples.
        drafts: what it verifies.
    """

    position: int
    drafts: Sequence[int] = ()


def row_limits(sampler: SequenceSampler, run: Run, settled: Settled | None, count: int) -> list[Limits]:
    """Of a row's next ``count`` tokens.

    Args:
        settled: of a decode whose sampler needs the host, where it continues a row of the step before.
    """
    known = settled or Settled(run.start + len(run.tokens))
    return sampler.limits(known.position, [*known.drafts, *[0] * count][: count - 1])


@dataclass(slots=True)
class SampledStep:
    """What a step samples: R rows, at Q positions or one each.

    Attributes:
        runs: the run of each row.
        counts: samples of each row.
        owned: whether a row is its run's own sequence, not another choice of it.
        positions: int32 ``[R]``, of each row's first sample.
        inputs: int32 ``[R, Q - 1]``, the drafts behind each row's newest token.
        num_drafts: how many of them are drafts, by row.
        tokens: int32 ``[R, Q]``.
        sound: bool ``[R, Q]``, whether the logits of each sample are numbers.
        accepted: int32 ``[R]``.
        drafts: int32 ``[R, D]``, made for the next step; None without any.
    """

    runs: list[int]
    counts: list[int]
    owned: list[bool]
    positions: Tensor
    inputs: Tensor
    num_drafts: list[int]
    tokens: Tensor
    sound: Tensor
    accepted: Tensor = field(default_factory=lambda: torch.empty(0))
    drafts: Tensor | None = None

    @property
    def left(self) -> Sampled:
        """What the next step continues."""
        return Sampled(self.tokens, self.accepted, self.positions, self.drafts)

    def rows(self, plan: StepPlan) -> dict[int, int]:
        """In which row each sequence goes on."""
        return {plan.runs[run].sequence: row for row, run in enumerate(self.runs) if self.owned[row]}


class StepChoice:
    """Of one rank.

    Args:
        seen: what penalties count.
        feeds_back: whether steps go on from what is left on the device.
    """

    def __init__(
        self, model: DecoderLM, kv_cache: KvCache, collectives: Collectives, seen: SeenTokens, *, feeds_back: bool
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._collectives = collectives
        self._seen = seen
        self._feeds_back = feeds_back

    def choose(
        self,
        plan: StepPlan,
        built: BuiltBatch,
        logits: Tensor,
        num_drafts: Sequence[int],
        samplers: Sequence[SequenceSampler],
        settled: Mapping[int, Settled],
    ) -> SampledStep:
        """Samples every row at all its positions, and settles how many of the samples are its own.

        Args:
            logits: fp32 ``[samples, vocab]``, of the rows in order.
            num_drafts: that each decode verifies.
            samplers: of each row.
            settled: by row, of decodes whose samplers need the host.
        """
        device, width, decodes = logits.device, plan.decode_q_len, plan.num_decodes
        runs = [row.run for row in plan.samples]
        counts = [width if run < decodes else 1 for run in runs]
        positions, inputs = self._positions(plan, built, runs)
        step = SampledStep(
            runs=runs,
            counts=counts,
            owned=[index == 0 or run != runs[index - 1] for index, run in enumerate(runs)],
            positions=positions,
            inputs=inputs,
            num_drafts=[num_drafts[run] if run < decodes else 0 for run in runs],
            tokens=torch.zeros((len(runs), width), dtype=torch.int32, device=device),
            sound=torch.ones((len(runs), width), dtype=torch.bool, device=device),
        )
        leads = self._collectives.rank == 0
        if leads:
            self._sample(plan, step, logits, samplers, settled)
        if self._feeds_back and self._collectives.size > 1:
            # Other ranks go on from the same tokens.
            step.tokens = self._collectives.all_reduce(step.tokens)
        slots = self._seen.slots(samplers, step.owned) if leads else None
        if width > 1 or slots is not None:
            step.accepted = verify_draft(
                step.tokens,
                inputs,
                num_drafts=integers(step.num_drafts, device),
                slots=slots,
                seen=None if slots is None else self._seen.table,
            )
        else:
            step.accepted = torch.ones(len(runs), dtype=torch.int32, device=device)
        return step

    def draft(self, plan: StepPlan, built: BuiltBatch, hidden: Tensor, step: SampledStep | None) -> Tensor | None:
        """Lets the draft layer go over the batch: the drafts of the next step, int32 ``[R, D]``."""
        assert isinstance(self._model, DraftModel)
        tokens = torch.zeros((0, 1), dtype=torch.int32, device=hidden.device) if step is None else step.tokens
        runs = [] if step is None else step.runs
        following = [run.next_token for run in plan.runs[plan.num_decodes :]]
        ids = next_token_ids(built.forward, following, tokens, runs)
        accepted = tokens.new_ones(0) if step is None else step.accepted
        return draft_tokens(self._model, built, hidden, ids, self._kv_cache, runs, accepted, plan.drafts)

    def _places(self, counts: Sequence[int], width: int) -> Tensor:
        """Flat place of each sample in the table of rows by positions, int64."""
        flat = [index * width + place for index, count in enumerate(counts) for place in range(count)]
        return integers(flat, self._model.device, torch.int64)

    def _positions(self, plan: StepPlan, built: BuiltBatch, runs: list[int]) -> tuple[Tensor, Tensor]:
        """Of each row the position of its first token, int32 ``[R]``, and what stands behind its newest token, int32
        ``[R, Q - 1]``."""
        decodes, width, device = plan.num_decodes, plan.decode_q_len, self._model.device
        positions = integers([plan.runs[run].start + len(plan.runs[run].tokens) for run in runs], device)
        inputs = torch.full((len(runs), width - 1), -1, dtype=torch.int32, device=device)
        # Decodes come first and have one row each, in order.
        of_decodes = sum(run < decodes for run in runs)
        if of_decodes:
            positions[:of_decodes] = built.inputs.sample_positions.view(decodes, width)[:, 0]
            inputs[:of_decodes] = built.inputs.token_ids.view(decodes, width)[:, 1:]
        return positions, inputs

    def _sample(
        self,
        plan: StepPlan,
        step: SampledStep,
        logits: Tensor,
        samplers: Sequence[SequenceSampler],
        settled: Mapping[int, Settled],
    ) -> None:
        device, width = logits.device, plan.decode_q_len
        rows = []
        for index, (sampler, count) in enumerate(zip(samplers, step.counts, strict=True)):
            limits = row_limits(sampler, plan.runs[step.runs[index]], settled.get(index), count)
            rows += [Row(sampler, plan.samples[index].choice, bias, mask) for bias, mask in limits]
        offsets = torch.arange(width, dtype=torch.int32, device=device)
        places = self._places(step.counts, width)
        positions = (step.positions[:, None] + offsets).view(-1)[places]
        pending = None
        if width > 1:
            behind_of = torch.where(offsets[:-1] < offsets[:, None], step.inputs[:, None, :], -1)
            pending = behind_of.reshape(-1, width - 1)[places]
        sound = torch.empty(len(rows), dtype=torch.bool, device=device)
        step.tokens.view(-1)[places] = sample_rows(logits, rows, positions, self._seen, pending, sound=sound)
        step.sound.view(-1)[places] = sound
