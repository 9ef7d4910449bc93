"""Carries out plans on one rank: moves pages, runs the model, and on the first rank samples.

    launched = runner.launch(plan)      nothing waits for the device here
    output = launched.output()          in the order of plans

All state a rank keeps between steps is what earlier plans said: block tables and, for sampling, seen tokens. The ranks
of a group carry out the same plans in the same order; that is all they need to agree.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from katydid_kernels import Sampled, advance
from katydid_kernels.sample import Logprobs as DeviceLogprobs
from katydid_kernels.sample import logprobs
from torch import Tensor

from katydid_engine.attention_plan import MAX_Q_LEN
from katydid_engine.batch_builder import BatchBuilder, BuiltBatch
from katydid_engine.chunk_steps import ChunkSteps
from katydid_engine.collectives import Collectives
from katydid_engine.compiled_grammars import CompiledGrammars
from katydid_engine.decode_buffers import Bucket
from katydid_engine.decode_steps import Captured, DecodeSteps, Pieces, Uncaptured
from katydid_engine.forward_batch import ForwardBatch, PrefillChunk
from katydid_engine.host_copies import integers
from katydid_engine.kv_cache import KvCache
from katydid_engine.logit_terms import Asked
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.page_mover import PageMover
from katydid_engine.plan import Run, SampleRow, Start, StepOutput, StepPlan
from katydid_engine.prompt_logprobs import prompt_logprobs
from katydid_engine.request import Sampling, pages_for
from katydid_engine.sampler import SamplingRows
from katydid_engine.seen_tokens import SeenTokens
from katydid_engine.sequence_sampler import SequenceSampler
from katydid_engine.slot_memory import SlotMemory
from katydid_engine.step_choice import SampledStep, Settled, StepChoice, row_limits
from katydid_engine.step_outcome import Launched, Left, RowsLeft

__all__ = ["Runner"]


class Runner:
    """One rank's model with ``num_pages`` pages.

    Args:
        slots: memory that blocks on their way to and from the cache service lie in; None without one.
        collectives: the TP group.
        grammars: where requests' grammars are compiled; None where no request has one, or on ranks that sample nothing.
        drafts: whether plans may ask for drafts; the model must have a draft layer then.
        ahead: whether plans may continue rows of a step that still runs when they are made.
        check: asked when the device is done with a step; raises where what came of it is wrong.
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
        check: Callable[[], None] | None = None,
    ) -> None:
        self._model = model
        self._check = check
        self._collectives = collectives
        self._grammars = grammars
        self._kv_cache = model.new_kv_cache(num_pages)
        self._pages = PageMover(model, self._kv_cache, collectives, slots)
        self._drafts = drafts
        self._feeds_back = drafts or ahead
        self._batches = BatchBuilder(model.device)
        self._samplers: dict[int, SequenceSampler] = {}
        # Lengths of the prompts that are computed sparsely.
        self._sparse_prompts: dict[int, int] = {}
        self._seen = SeenTokens(model.config.vocab_size, model.device)
        self._choice = StepChoice(model, self._kv_cache, collectives, self._seen, feeds_back=self._feeds_back)
        self._steps: DecodeSteps | None = None
        self._chunk_steps: ChunkSteps | None = None
        self._sparse_chunk_steps: ChunkSteps | None = None
        # What the last step sampled, still on the device, and in which row each sequence.
        self._before: Sampled | None = None
        self._last_rows: dict[int, int] = {}
        self._last: Launched | None = None
        self._last_step: Launched | None = None

    @property
    def kv_cache(self) -> KvCache:
        """The pages that plans number."""
        return self._kv_cache

    def prepare_decodes(
        self,
        rows: int,
        tokens: int,
        depths: Iterable[int] = (0,),
        *,
        capture: bool,
        agreement: float | None = None,
    ) -> None:
        """``use_decode_steps``, prepared: as CUDA graphs, or op by op."""
        pieces = Captured() if capture else Uncaptured()
        self.use_decode_steps(pieces, rows=rows, tokens=tokens, depths=depths, agreement=agreement).prepare()

    def use_decode_steps(
        self,
        pieces: Pieces,
        *,
        rows: int,
        tokens: int,
        depths: Iterable[int] = (0,),
        agreement: float | None = None,
    ) -> DecodeSteps:
        """From now on steps of decodes alone run over tensors that never move, padded to a bucket; the caller prepares
        what is returned before the first of them.

        Args:
            pieces: how they are carried out.
            rows: most of a step.
            tokens: most of a sequence.
            depths: numbers of drafts that such steps verify and make.
            agreement: as `DecodeSteps` has it.
        """
        pages = pages_for(tokens + MAX_Q_LEN)
        self._steps = DecodeSteps(
            self._model,
            self._kv_cache,
            self._collectives,
            pieces,
            self._seen,
            rows=rows,
            pages=pages,
            depths=depths,
            agreement=agreement,
        )
        return self._steps

    def use_chunk_steps(
        self,
        pieces: Pieces,
        *,
        rows: int,
        tokens: int,
        depths: Iterable[int] = (0,),
        sparse: bool = False,
        **sizes: Sequence[int],
    ) -> ChunkSteps:
        """From now on passes of decodes with a chunk beside them, of a ``sparse`` prompt or of another, and larger ones
        without decodes, of ``sizes`` as `ChunkSteps` names them, run over tensors that never move; the rest is as of
        ``use_decode_steps``."""
        model, cache, pages = self._model, self._kv_cache, pages_for(tokens + MAX_Q_LEN)
        steps = ChunkSteps(model, cache, pieces, rows=rows, pages=pages, depths=depths, sparse=sparse, **sizes)
        if sparse:
            self._sparse_chunk_steps = steps
        else:
            self._chunk_steps = steps
        return steps

    def run(self, plan: StepPlan) -> StepOutput:
        """Carries out one plan; the output is empty on all ranks but the first."""
        return self.launch(plan).output()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Begins to carry out one plan; what it samples is copied to the host when the device is done with it."""
        for sequence in plan.ends:
            self._batches.end(sequence)
            self._seen.end(sequence)
            self._last_rows.pop(sequence, None)
            self._sparse_prompts.pop(sequence, None)
            del self._samplers[sequence]
        for start in plan.starts:
            self._batches.start(start.sequence)
            if start.sparse_prefill and self._model.computes_sparsely(start.num_prompt):
                self._sparse_prompts[start.sequence] = start.num_prompt
            sampler = SequenceSampler(start, self._model.config.eos_token_ids, self._grammars)
            self._samplers[start.sequence] = sampler
            self._seen.begin(sampler)
        self._pages.start(plan)
        rows, prompts = self._compute(plan) if plan.runs else (None, {})
        self._pages.join()
        launched = Launched(
            plan,
            self._model.device,
            rows=rows,
            prompt_logprobs=prompts,
            over=self._pages.over,
            check=self._check,
            before=self._last_step,
        )
        self._last_step = launched
        if plan.runs:
            self._last = launched
        return launched

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

    def _compute(self, plan: StepPlan) -> tuple[RowsLeft | None, dict[int, list[DeviceLogprobs]]]:
        """What is sampled, as far as this rank tells, and log probabilities of prompts."""
        previous, num_drafts = self._continued(plan)
        bucket = self._bucket(plan)
        if bucket is not None:
            return self._decode(plan, bucket, previous, num_drafts), {}
        built = self._batches.build(plan.runs, plan.num_decodes, plan.decode_q_len)
        if self._before is not None and any(row >= 0 for row in previous):
            advance(built.inputs, self._before, integers(previous, self._model.device))
        batch = built.forward
        chunks = plan.runs[plan.num_decodes :]
        if any(run.sequence in self._sparse_prompts for run in chunks):
            batch = replace(batch, prefills=tuple(map(self._chunk, chunks)))
        hidden = self._forward(plan, batch)
        if not self._model.has_head:
            return None, {}
        prompts = prompt_logprobs(plan, hidden, self._model)
        if not plan.samples:
            self._drafted(plan, built, hidden, None)
            self._leave(plan, None)
            return None, prompts
        logits = self._model.logits(hidden[integers(plan.sampled_places, hidden.device, torch.int64)])
        return self._choose(plan, built, hidden, logits, previous, num_drafts), prompts

    def _forward(self, plan: StepPlan, batch: ForwardBatch) -> Tensor:
        steps = self._sparse_chunk_steps if batch.prefills else self._chunk_steps
        if steps is not None and not plan.waits and self._model.before_pass is None:
            prepared = steps.bucket(batch)
            if prepared is not None:
                return steps.forward(*prepared, batch)
        return self._model.forward(batch, self._kv_cache)

    def _bucket(self, plan: StepPlan) -> Bucket | None:
        """Of a step of decodes alone; None where it is of another kind."""
        steps = self._steps
        alone = plan.num_decodes == len(plan.runs) == len(plan.samples) and not plan.waits
        if steps is None or not alone or not self._left_fits:
            return None
        longest = max(run.start for run in plan.runs) + plan.decode_q_len
        if pages_for(longest) > steps.buffers.pages:
            return None
        rows, width = len(plan.runs), plan.decode_q_len
        if (bucket := steps.bucket(rows, width)) is None or self._model.before_pass is None:
            return bucket
        most = self._model.rows_at_once(bucket.rows, width, plan.drafts)
        return steps.bucket_in(rows, width, self._model.agree(0, most, plan.drafts))

    @property
    def _left_fits(self) -> bool:
        """Whether the graphs can go on from what the last step left."""
        assert self._steps is not None
        return self._before is None or len(self._before.tokens) <= self._steps.buffers.rows

    def _decode(
        self, plan: StepPlan, bucket: Bucket, previous: Sequence[int], num_drafts: Sequence[int]
    ) -> RowsLeft | None:
        steps = self._steps
        assert steps is not None
        samplers = [self._samplers[run.sequence] for run in plan.runs]
        sampling = SamplingRows(samplers, [row.choice for row in plan.samples])
        rows = self._batches.decode_rows(plan.runs, plan.decode_q_len)
        own = steps.buffers.fill(bucket, rows, sampling, previous, num_drafts)
        hidden = steps.forward(bucket)[: len(plan.runs) * plan.decode_q_len]
        # Where ranks that compute together draft as many tokens they have agreed on those passes too, else not yet.
        one_by_one = plan.drafts > 0 and self._model.before_pass is not None and not self._model.agreed_passes
        if one_by_one or plan.drafts != bucket.drafts or not steps.terms.fit(samplers, bucket.width):
            return self._choose(plan, own.built, hidden, self._model.logits(hidden), previous, num_drafts)
        leads, plain = self._collectives.rank == 0, all(sampler.plain for sampler in samplers)
        count, parted = len(plan.runs), plain and self._collectives.size > 1
        asked = Asked(parted=parted, filters=parted and sampling.filters)
        if leads and not plain:
            asked, settled = Asked(terms=True), self._settled(plan, samplers, previous)
            rows_of = zip(samplers, plan.runs, strict=True)
            limits = [row_limits(*of, settled.get(row), bucket.width) for row, of in enumerate(rows_of)]
            steps.terms.fill(samplers, limits)
        left, self._before = steps.choose(bucket, count, asked)
        self._last_rows = {run.sequence: row for row, run in enumerate(plan.runs)}
        if not leads:
            return None
        wanted = steps.terms.wanted(samplers, bucket.width)
        return RowsLeft(left, range(count), samplers, [True] * count, num_drafts, wanted)

    def _chunk(self, run: Run) -> PrefillChunk:
        new = len(run.tokens)
        return PrefillChunk(new, run.start + new, self._sparse_prompts.get(run.sequence))

    def _continued(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """The row of the step before that each decode continues, or -1, and how many drafts it verifies."""
        decodes = plan.runs[: plan.num_decodes]
        if self._before is None or not (plan.decode_q_len > 1 or any(run.ahead for run in decodes)):
            return [-1] * len(decodes), [0] * len(decodes)
        rows = [self._last_rows.get(run.sequence, -1) for run in decodes]
        made = 0 if self._before.drafts is None else min(plan.decode_q_len - 1, self._before.drafts.shape[1])
        return rows, [made if row >= 0 else 0 for row in rows]

    def _choose(
        self,
        plan: StepPlan,
        built: BuiltBatch,
        hidden: Tensor,
        logits: Tensor,
        previous: Sequence[int],
        num_drafts: Sequence[int],
    ) -> RowsLeft | None:
        """Samples and drafts op by op."""
        samplers = [self._samplers[plan.runs[row.run].sequence] for row in plan.samples]
        leads = self._collectives.rank == 0
        settled = self._settled(plan, samplers, previous) if leads else {}
        step = self._choice.choose(plan, built, logits, num_drafts, samplers, settled)
        step.drafts = self._drafted(plan, built, hidden, step)
        self._leave(plan, step)
        if not leads:
            return None
        starts = [0, *itertools.accumulate(step.counts)]
        wanted = {
            row: logprobs(
                logits[starts[row] : starts[row + 1]], step.tokens[row, : step.counts[row]], sampler.sampling.logprobs
            )
            for row, sampler in enumerate(samplers)
            if sampler.sampling.logprobs is not None
        }
        left = Left(step.tokens, step.accepted, step.positions, step.drafts, step.sound)
        return RowsLeft(left, step.runs, samplers, step.owned, step.num_drafts, wanted)

    def _settled(
        self, plan: StepPlan, samplers: Sequence[SequenceSampler], previous: Sequence[int]
    ) -> dict[int, Settled]:
        """For rows that depend on tokens which the host must know first: the step before is told now."""
        rows = [row for row, sampler in enumerate(samplers) if sampler.needs_host]
        if not rows or self._last is None:
            return {}
        self._last.output()
        settled = {}
        for row in rows:
            run = plan.samples[row].run
            if run < plan.num_decodes and previous[run] >= 0:
                left, source = self._last.left, previous[run]
                drafts = [] if left.drafts is None else left.drafts[source].tolist()
                settled[row] = Settled(int(left.positions[source]) + int(left.accepted[source]), drafts)
        return settled

    def _drafted(self, plan: StepPlan, built: BuiltBatch, hidden: Tensor, step: SampledStep | None) -> Tensor | None:
        """The drafts of the next step; the draft layer's pages hold every token of a prompt, wanted or not."""
        if not self._drafts or not (plan.drafts or plan.num_decodes < len(plan.runs)):
            return None
        return self._choice.draft(plan, built, hidden, step)

    def _leave(self, plan: StepPlan, step: SampledStep | None) -> None:
        """Leaves the next step what it continues."""
        self._last_rows = {}
        self._before = None
        if step is None or not self._feeds_back:
            return
        self._last_rows = step.rows(plan)
        self._before = step.left
        if self._steps is not None and self._left_fits:
            self._before = self._steps.buffers.keep(step.left)
