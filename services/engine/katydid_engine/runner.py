"""Carries out plans on one rank: moves pages, runs the model, and on the first rank samples.

    output = runner.run(plan)

All state a rank keeps between steps is what earlier plans said: block tables and, for sampling, seen tokens. The ranks
of a group carry out the same plans in the same order; that is all they need to agree.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from katydid_kernels import kv_pack, kv_unpack, published_checksum
from torch import Tensor

from katydid_engine.batch_builder import BatchBuilder
from katydid_engine.collectives import Collectives
from katydid_engine.compiled_grammars import CompiledGrammars
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.plan import Logprobs, PageCopy, Run, SampleRow, Start, StepOutput, StepPlan, Transfer
from katydid_engine.request import Sampling
from katydid_engine.sampler import Row, SequenceSampler, sample_rows, token_logprobs
from katydid_engine.slot_memory import SlotMemory

__all__ = ["Runner"]

_PROMPT_LOGPROB_ROWS = 128


class Runner:
    """One rank's model with ``num_pages`` pages.

    Args:
        slots: memory that blocks on their way to and from the cache service lie in; None without one.
        collectives: the TP group.
        grammars: where requests' grammars are compiled; None where no request has one, or on ranks that sample nothing.
    """

    def __init__(
        self,
        model: DecoderLM,
        num_pages: int,
        *,
        collectives: Collectives,
        slots: SlotMemory | None = None,
        grammars: CompiledGrammars | None = None,
    ) -> None:
        self._model = model
        self._collectives = collectives
        self._slots = slots
        self._grammars = grammars
        self._kv_cache = model.new_kv_cache(num_pages)
        self._batches = BatchBuilder(model.device)
        self._samplers: dict[int, SequenceSampler] = {}

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Carries out one plan; the output is empty on all ranks but the first."""
        for sequence in plan.ends:
            self._batches.end(sequence)
            del self._samplers[sequence]
        for start in plan.starts:
            self._batches.start(start.sequence)
            self._samplers[start.sequence] = SequenceSampler(start, self._model.config.eos_token_ids, self._grammars)
        sums = self._move(plan)
        output = self._compute(plan) if plan.runs else StepOutput()
        if sums is not None:
            # Read last: on a GPU this waits for the transfers, without which their slots must not be given back.
            moved = _published(sums.tolist(), (*plan.packs, *plan.unpacks))
            output = replace(output, packed=moved[: len(plan.packs)], unpacked=moved[len(plan.packs) :])
        return output

    def warm_up(self) -> None:
        """Computes a prompt and a decode whose K and V are not stored, so that no request pays for first use."""
        greedy = Sampling(ignore_eos=True)
        nothing = array("I")
        prompt = Run(0, 0, array("I", range(8)), 0, array("I", (0,)), writes=False)
        decode = Run(0, 8, array("I", (0,)), 1, nothing, writes=False)
        self.run(StepPlan(0, starts=(Start(0, greedy, 8, prompt.tokens),), runs=(prompt,), samples=(SampleRow(0, 0),)))
        self.run(StepPlan(0, runs=(decode,), num_decodes=1, samples=(SampleRow(0, 0),)))
        self.run(StepPlan(0, ends=(0,)))

    def _move(self, plan: StepPlan) -> Tensor | None:
        """Moves pages; the linear checksums of packs, then of unpacks, int64 ``[transfers]``; None without any."""
        packed = self._transfer(kv_pack, plan.packs)
        if plan.copies:
            self._copy(plan.copies)
        unpacked = self._transfer(kv_unpack, plan.unpacks)
        if not (plan.packs or plan.unpacks):
            return None
        # The sum over ranks is that of the whole object. Rank 0 tells the face that slots are full or free: every rank
        # must be done with its heads by then, summed or not.
        return self._collectives.all_reduce(torch.cat((packed, unpacked)))

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        sources = [copy.source for copy in copies]
        targets = [copy.target for copy in copies]
        for pages in (*self._kv_cache.k_pages, *self._kv_cache.v_pages):
            pages[targets] = pages[sources]

    def _transfer(self, move: Callable[..., None], transfers: Sequence[Transfer]) -> Tensor:
        """Carries out transfers; this rank's part of their checksums, int64 ``[transfers]``."""
        device = self._model.device
        sums = torch.zeros(len(transfers), dtype=torch.int64, device=device)
        if not transfers:
            return sums
        assert self._slots is not None
        for objects, places in self._slots.groups(transfers):
            some = [transfers[place] for place in places]
            part = sums.new_zeros(len(some)) if any(transfer.summed for transfer in some) else None
            move(
                self._kv_cache.k_pages,
                self._kv_cache.v_pages,
                torch.tensor([transfer.page for transfer in some], dtype=torch.int32).to(device),
                objects,
                torch.tensor([self._slots.row(transfer.slot) for transfer in some], dtype=torch.int32).to(device),
                object_kv_heads=self._model.config.num_kv_heads,
                first_head=self._model.first_kv_head,
                checksums=part,
            )
            if part is not None:
                sums[places] = part
        return sums

    def _compute(self, plan: StepPlan) -> StepOutput:
        batch = self._batches.build(plan.runs, plan.num_decodes)
        ends = [0, *itertools.accumulate(len(run.tokens) for run in plan.runs)]
        hidden = self._model.forward(batch, self._kv_cache)
        if not self._model.has_head:
            return StepOutput()
        prompt_logprobs = self._prompt_logprobs(plan, hidden, ends)
        if not plan.samples:
            return StepOutput((), {}, prompt_logprobs)
        sampled = sorted({row.run for row in plan.samples})
        logits = self._model.logits(hidden[[ends[run + 1] - 1 for run in sampled]])
        if self._collectives.rank != 0:
            return StepOutput()
        return self._sample(plan, logits, sampled, prompt_logprobs)

    def _sample(
        self, plan: StepPlan, logits: Tensor, sampled: list[int], prompt_logprobs: dict[int, Logprobs]
    ) -> StepOutput:
        finite = torch.isfinite(logits.amax(dim=-1))
        row_of = {run: index for index, run in enumerate(sampled)}
        if len(plan.samples) > len(sampled):
            logits = logits[[row_of[row.run] for row in plan.samples]]
        rows = []
        for sample in plan.samples:
            run = plan.runs[sample.run]
            rows.append(Row(self._samplers[run.sequence], sample.choice, run.start + len(run.tokens)))
        tokens = sample_rows(logits, rows)
        complete = frozenset(index for index, row in enumerate(rows) if row.sequence.completes(tokens[index]))
        noted: set[int] = set()
        for sample, row, token in zip(plan.samples, rows, tokens, strict=True):
            if sample.run not in noted:
                row.sequence.note(token)
                noted.add(sample.run)
        logprobs = {
            index: token_logprobs(logits[index : index + 1], [tokens[index]], row.sequence.sampling.logprobs)
            for index, row in enumerate(rows)
            if row.sequence.sampling.logprobs is not None
        }
        broken = frozenset(run for run, sound in zip(sampled, finite.tolist(), strict=True) if not sound)
        misfits = {sample.run: row.sequence.misfit for sample, row in zip(plan.samples, rows, strict=True)}
        return StepOutput(
            tuple(tokens),
            logprobs,
            prompt_logprobs,
            broken,
            {run: misfit for run, misfit in misfits.items() if misfit},
            complete,
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


def _published(sums: Sequence[int], transfers: Sequence[Transfer]) -> tuple[int, ...]:
    return tuple(published_checksum(total) * of.summed for total, of in zip(sums, transfers, strict=True))


def _join(parts: Sequence[Logprobs]) -> Logprobs:
    joined = Logprobs(parts[0].top, array("f"))
    for part in parts:
        joined.chosen.extend(part.chosen)
        joined.top_tokens.extend(part.top_tokens)
        joined.top_logprobs.extend(part.top_logprobs)
    return joined
