"""Carries out plans on one rank: moves pages, runs the model, and on the first rank samples.

    output = runner.run(plan)

All state a rank keeps between steps is what earlier plans said: block tables and, for sampling, seen tokens. The ranks
of a group carry out the same plans in the same order; that is all they need to agree.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from katydid_kernels import Sampled, advance, verify_draft
from torch import Tensor

from katydid_engine.batch_builder import BatchBuilder, BuiltBatch
from katydid_engine.collectives import Collectives
from katydid_engine.compiled_grammars import CompiledGrammars
from katydid_engine.drafting import DraftModel, draft_tokens, next_token_ids
from katydid_engine.forward_batch import PrefillChunk
from katydid_engine.kv_cache import KvCache
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.page_mover import PageMover, published_checksums
from katydid_engine.plan import Logprobs, Run, SampleRow, Start, StepOutput, StepPlan
from katydid_engine.request import Sampling
from katydid_engine.sampler import Row, sample_rows, token_logprobs
from katydid_engine.seen_tokens import SeenTokens
from katydid_engine.sequence_sampler import SequenceSampler
from katydid_engine.slot_memory import SlotMemory

__all__ = ["Runner"]

_PROMPT_LOGPROB_ROWS = 128


class Runner:
    """One rank's model with ``num_pages`` pages.

    Args:
        slots: memory that blocks on their way to and from the cache service lie in; None without one.
        collectives: the TP group.
        grammars: where requests' grammars are compiled; None where no request has one, or on ranks that sample nothing.
        drafts: whether plans may ask for drafts; the model must have a draft layer then.
        ahead: whether plans may continue rows of a step that still runs when they are made.
    """

    def __init__(
        self,
        model: DecoderLM,
        num_pages: int,
        *,
        collectives: Collectives,
        slots: SlotMemory | None = None,
        grammars: CompiledGrammars | None = None,
        drafts: bool = False,
        ahead: bool = False,
    ) -> None:
        self._model = model
        self._collectives = collectives
        self._grammars = grammars
        self._kv_cache = model.new_kv_cache(num_pages)
        self._pages = PageMover(model, self._kv_cache, collectives, slots)
        self._drafts = drafts
        self._feeds_back = drafts or ahead
        self._batches = BatchBuilder(model.device)
        self._samplers: dict[int, SequenceSampler] = {}
        # Lengths of the prompts that may be computed sparsely.
        self._sparse_prompts: dict[int, int] = {}
        self._seen = SeenTokens(model.config.vocab_size, model.device)
        # What the last step sampled, still on the device, and in which row each sequence.
        self._before: Sampled | None = None
        self._last_rows: dict[int, int] = {}

    @property
    def kv_cache(self) -> KvCache:
        """Its pages."""
        return self._kv_cache

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Carries out one plan; the output is empty on all ranks but the first."""
        for sequence in plan.ends:
            self._batches.end(sequence)
            self._seen.end(sequence)
            self._last_rows.pop(sequence, None)
            self._sparse_prompts.pop(sequence, None)
            del self._samplers[sequence]
        for start in plan.starts:
            self._batches.start(start.sequence)
            if start.sparse_prefill:
                self._sparse_prompts[start.sequence] = start.num_prompt
            self._samplers[start.sequence] = SequenceSampler(start, self._model.config.eos_token_ids, self._grammars)
        sums = self._pages.move(plan)
        output = self._compute(plan) if plan.runs else StepOutput()
        if sums is not None:
            # Read last: on a GPU this waits for the transfers, without which their slots must not be given back.
            moved = published_checksums(sums.tolist(), (*plan.packs, *plan.unpacks))
            output = replace(output, packed=moved[: len(plan.packs)], unpacked=moved[len(plan.packs) :])
        return output

    def warm_up(self, tokens: int = 8, sequences: int = 1, context: int = 9, drafts: int = 0) -> None:
        """Computes a prompt and decodes, so that no request pays for first use, nor finds too little memory.

        Args:
            tokens: of the prompt: what a step computes at most.
            sequences: that decode.
            context: length of each of them.
            drafts: verified and made behind each.
        """
        greedy = Sampling(ignore_eos=True)
        prompt = array("I", [0] * tokens)
        page = array("I", (0,))
        starts = tuple(Start(sequence, greedy, tokens, prompt) for sequence in range(sequences))
        runs = tuple(Run(start.sequence, context - 1, page, 0, page, writes=False) for start in starts)
        samples = tuple(SampleRow(index, 0) for index in range(sequences))
        self.run(
            StepPlan(
                0,
                starts=starts,
                runs=(Run(0, 0, prompt, 0, page, writes=False),),
                samples=samples[:1],
                drafts=drafts,
            )
        )
        for _ in range(2):
            self.run(
                StepPlan(
                    0,
                    runs=runs,
                    num_decodes=sequences,
                    decode_q_len=1 + drafts,
                    samples=samples,
                    drafts=drafts,
                )
            )
        self.run(StepPlan(0, ends=tuple(range(sequences))))

    def _compute(self, plan: StepPlan) -> StepOutput:
        built = self._batches.build(plan.runs, plan.num_decodes, plan.decode_q_len)
        num_drafts = self._continue(plan, built)
        batch = built.forward
        if self._sparse_prompts:
            batch = replace(batch, prefills=tuple(map(self._chunk, plan.runs[plan.num_decodes :])))
        ends = _ends(plan)
        hidden = self._model.forward(batch, self._kv_cache)
        if not self._model.has_head:
            return StepOutput()
        prompt_logprobs = self._prompt_logprobs(plan, hidden, ends)
        step = None
        if plan.samples:
            places = _sampled_places(plan, ends)
            owned = list(dict.fromkeys(places))
            logits = self._model.logits(hidden[owned])
            if len(owned) < len(places):
                # Several choices of one prompt are sampled from the same logits.
                logits = logits[[owned.index(place) for place in places]]
            step = self._choose(plan, built, logits, num_drafts)
        self._draft(plan, built, hidden, step)
        if step is None:
            return StepOutput(prompt_logprobs=prompt_logprobs)
        return self._output(plan, step, logits, prompt_logprobs) if self._collectives.rank == 0 else StepOutput()

    def _chunk(self, run: Run) -> PrefillChunk:
        new = len(run.tokens)
        return PrefillChunk(new, run.start + new, self._sparse_prompts.get(run.sequence))

    def _continue(self, plan: StepPlan, built: BuiltBatch) -> list[int]:
        """Rewrites decodes by what the step before left on the device; returns the drafts that each verifies."""
        rows = [self._last_rows.get(run.sequence, -1) for run in plan.runs[: plan.num_decodes]]
        ahead = any(run.ahead for run in plan.runs[: plan.num_decodes])
        if self._before is None or not (ahead or plan.decode_q_len > 1):
            return [0] * plan.num_decodes
        advance(built.inputs, self._before, torch.tensor(rows, dtype=torch.int32).to(self._model.device))
        made = 0 if self._before.drafts is None else min(plan.decode_q_len - 1, self._before.drafts.shape[1])
        return [made if row >= 0 else 0 for row in rows]

    def _choose(self, plan: StepPlan, built: BuiltBatch, logits: Tensor, num_drafts: list[int]) -> _Step:
        """Samples every row at all its positions, and settles how many of the samples are its own."""
        device, width, decodes = logits.device, plan.decode_q_len, plan.num_decodes
        runs = [row.run for row in plan.samples]
        counts = [width if run < decodes else 1 for run in runs]
        positions, drafts = self._positions(plan, built, runs)
        step = _Step(
            runs=runs,
            counts=counts,
            owned=_first_of(runs),
            positions=positions,
            drafts=drafts,
            num_drafts=[num_drafts[run] if run < decodes else 0 for run in runs],
            tokens=torch.zeros((len(runs), width), dtype=torch.int32, device=device),
        )
        if self._collectives.rank == 0:
            self._sample(plan, step, logits)
        if self._feeds_back and self._collectives.size > 1:
            # Other ranks go on from the same tokens.
            step.tokens = self._collectives.all_reduce(step.tokens)
        slots = None
        if self._collectives.rank == 0:
            slots = self._seen.slots([self._samplers[plan.runs[run].sequence] for run in runs])
        if slots is not None:
            slots = torch.where(torch.tensor(step.owned, device=device), slots, -1)
        if width > 1 or slots is not None:
            step.accepted = verify_draft(
                step.tokens,
                drafts,
                num_drafts=torch.tensor(step.num_drafts, dtype=torch.int32).to(device),
                slots=slots,
                seen=None if slots is None else self._seen.table,
            )
        else:
            step.accepted = torch.ones(len(runs), dtype=torch.int32, device=device)
        return step

    def _positions(self, plan: StepPlan, built: BuiltBatch, runs: list[int]) -> tuple[Tensor, Tensor]:
        """Of each row the position of its first token, int32 ``[R]``, and what stands behind its newest token, int32
        ``[R, Q - 1]``."""
        decodes, width, device = plan.num_decodes, plan.decode_q_len, self._model.device
        known = [plan.runs[run].start + len(plan.runs[run].tokens) for run in runs]
        positions = torch.tensor(known, dtype=torch.int32).to(device, non_blocking=True)
        drafts = torch.full((len(runs), width - 1), -1, dtype=torch.int32, device=device)
        # Decodes come first and have one row each, in order.
        of_decodes = sum(run < decodes for run in runs)
        if of_decodes:
            positions[:of_decodes] = built.inputs.sample_positions.view(decodes, width)[:, 0]
            drafts[:of_decodes] = built.inputs.token_ids.view(decodes, width)[:, 1:]
        return positions, drafts

    def _sample(self, plan: StepPlan, step: _Step, logits: Tensor) -> None:
        device, width = logits.device, plan.decode_q_len
        samplers = [self._samplers[plan.runs[run].sequence] for run in step.runs]
        on_host = any(sampler.needs_host for sampler in samplers)
        first = step.positions.tolist() if on_host else [0] * len(samplers)
        drafts = step.drafts.tolist() if on_host else [[]] * len(samplers)
        rows = []
        for index, (sampler, count) in enumerate(zip(samplers, step.counts, strict=True)):
            behind = drafts[index][: count - 1] if sampler.needs_host else [0] * (count - 1)
            choice = plan.samples[index].choice
            rows += [Row(sampler, choice, bias, mask) for bias, mask in sampler.limits(first[index], behind)]
        # Flat place of each sample in the table of rows by positions.
        flat = [index * width + place for index, count in enumerate(step.counts) for place in range(count)]
        places = torch.tensor(flat, dtype=torch.int64).to(device, non_blocking=True)
        offsets = torch.arange(width, dtype=torch.int32, device=device)
        positions = (step.positions[:, None] + offsets).view(-1)[places]
        pending = None
        if width > 1:
            behind_of = torch.where(offsets[:-1] < offsets[:, None], step.drafts[:, None, :], -1)
            pending = behind_of.reshape(-1, width - 1)[places]
        step.tokens.view(-1)[places] = sample_rows(logits, rows, positions, self._seen, pending)

    def _draft(self, plan: StepPlan, built: BuiltBatch, hidden: Tensor, step: _Step | None) -> None:
        """Makes the drafts of the next step, and leaves it what it continues."""
        self._last_rows = {}
        self._before = None
        if step is None and not self._drafts:
            return
        tokens = torch.zeros((0, 1), dtype=torch.int32, device=hidden.device) if step is None else step.tokens
        runs = [] if step is None else step.runs
        drafts = None
        if self._drafts and (plan.drafts or plan.num_decodes < len(plan.runs)):
            assert isinstance(self._model, DraftModel)
            following = [run.next_token for run in plan.runs[plan.num_decodes :]]
            ids = next_token_ids(built.forward, following, tokens, runs)
            accepted = tokens.new_ones(0) if step is None else step.accepted
            drafts = draft_tokens(self._model, built, hidden, ids, self._kv_cache, runs, accepted, plan.drafts)
        if step is not None and self._feeds_back:
            self._before = Sampled(step.tokens, step.accepted, step.positions, drafts)
            self._last_rows = {plan.runs[run].sequence: row for row, run in enumerate(runs) if step.owned[row]}

    def _output(self, plan: StepPlan, step: _Step, logits: Tensor, prompt_logprobs: dict[int, Logprobs]) -> StepOutput:
        """What the host gets to know."""
        sound = torch.isfinite(logits.amax(dim=-1)).tolist()
        tokens: list[array[int]] = []
        logprobs, misfits = {}, {}
        broken, complete = set(), set()
        starts = [0, *itertools.accumulate(step.counts)]
        for row, (own, count) in enumerate(zip(step.tokens.tolist(), step.accepted.tolist(), strict=True)):
            run = step.runs[row]
            sampler = self._samplers[plan.runs[run].sequence]
            if step.owned[row]:
                accepted, ends = sampler.accept(array("I", own[:count]))
            else:
                accepted, ends = array("I", own[:1]), sampler.would_end(own[0])
            tokens.append(accepted)
            if ends:
                complete.add(row)
            if sampler.misfit:
                misfits[run] = sampler.misfit
            place = starts[row]
            if not all(sound[place : place + count]):
                broken.add(run)
            if sampler.sampling.logprobs is not None:
                rows = logits[place : place + len(accepted)]
                logprobs[row] = token_logprobs(rows, accepted, sampler.sampling.logprobs)
        return StepOutput(
            tuple(tokens),
            tuple(step.num_drafts),
            logprobs,
            prompt_logprobs,
            frozenset(broken),
            misfits,
            frozenset(complete),
        )

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor, ends: list[int]) -> dict[int, Logprobs]:
        """For the runs that ask; in slices, because logits of a whole chunk would be large."""
        results = {}
        for index, run in enumerate(plan.runs):
            parts = []
            for first in range(0, len(run.prompt_targets), _PROMPT_LOGPROB_ROWS):
                targets = run.prompt_targets[first : first + _PROMPT_LOGPROB_ROWS]
                start = ends[index] + run.prompt_row + first
                logits = self._model.logits(hidden[start : start + len(targets)])
                parts.append(token_logprobs(logits, targets, run.prompt_top))
            if parts:
                results[index] = _join(parts)
        return results


@dataclass(slots=True)
class _Step:
    """What a step samples: R rows, at Q positions or one each.

    Attributes:
        runs: the run of each row.
        counts: samples of each row.
        owned: whether a row is its run's own sequence, not another choice of it.
        positions: int32 ``[R]``, of each row's first sample.
        drafts: int32 ``[R, Q - 1]``.
        num_drafts: how many of them are drafts, by row.
        tokens: int32 ``[R, Q]``.
        accepted: int32 ``[R]``.
    """

    runs: list[int]
    counts: list[int]
    owned: list[bool]
    positions: Tensor
    drafts: Tensor
    num_drafts: list[int]
    tokens: Tensor
    accepted: Tensor = field(default_factory=lambda: torch.empty(0))


def _ends(plan: StepPlan) -> list[int]:
    """Where each run begins among the step's tokens, and where the last ends."""
    counts = [plan.decode_q_len if index < plan.num_decodes else len(run.tokens) for index, run in enumerate(plan.runs)]
    return [0, *itertools.accumulate(counts)]


def _sampled_places(plan: StepPlan, ends: list[int]) -> list[int]:
    """The token behind which each sample comes: all of a decode, the last of a prompt."""
    places: list[int] = []
    for row in plan.samples:
        first = ends[row.run] if row.run < plan.num_decodes else ends[row.run + 1] - 1
        places.extend(range(first, ends[row.run + 1]))
    return places


def _first_of(runs: list[int]) -> list[bool]:
    return [index == 0 or run != runs[index - 1] for index, run in enumerate(runs)]


def _join(parts: Sequence[Logprobs]) -> Logprobs:
    joined = Logprobs(parts[0].top, array("f"))
    for part in parts:
        joined.chosen.extend(part.chosen)
        joined.top_tokens.extend(part.top_tokens)
        joined.top_logprobs.extend(part.top_logprobs)
    return joined
