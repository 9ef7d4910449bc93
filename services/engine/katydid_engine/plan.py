"""What one step does, as data: made by the scheduler, carried out in the same order by every rank of its group.

Transfers between pages and slots go on beside the steps on a GPU: a step's output tells which are over, of this step or
of one before. Their pages belong to them until then. Elsewhere they are over with their own step.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field

from katydid_engine.request import Sampling

__all__ = ["Logprobs", "Moved", "PageCopy", "Run", "SampleRow", "Start", "StepOutput", "StepPlan", "Transfer"]


@dataclass(frozen=True, slots=True)
class Start:
    """A sequence appears for the first time, or again after a preemption."""

    sequence: int
    sampling: Sampling
    num_prompt: int
    tokens: array[int]
    sparse_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one sequence to compute.

    Attributes:
        start: tokens whose K and V already lie in the pages.
        tokens: ids at positions ``start`` and on.
        table_from: the sequence's block table is ``pages`` from this index on, unchanged before it.
        writes: False when the tokens' K and V lie in shared pages already and must not be written again.
        ahead: a decode that was planned while the step that samples its token still ran: it continues the row that the
            sequence has in that step. ``start`` is the largest it can be, and the token is not known yet (0).
        next_token: the token that follows the run, where that is known and not to be sampled; else -1.
        prompt_top: log probabilities are wanted of ``prompt_targets``, with so many top entries beside each; the first
            target follows row ``prompt_row`` of this run, the others follow the rows after it.
    """

    sequence: int
    start: int
    tokens: array[int]
    table_from: int
    pages: array[int]
    writes: bool = True
    ahead: bool = False
    next_token: int = -1
    prompt_top: int = 0
    prompt_row: int = 0
    prompt_targets: array[int] = field(default_factory=lambda: array("I"))


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What follows run ``run``, sampled as choice ``choice`` of its sequence's request: one token, or after a decode
    with drafts as many as are its own."""

    run: int
    choice: int


@dataclass(frozen=True, slots=True)
class PageCopy:
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One block between a page and a slot, of the staging buffer or of the cache service's memory (``arena_slot``).

    ``summed``: the step's output is to have its linear checksum.
    """

    page: int
    slot: int
    summed: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The first ``num_decodes`` runs hold one token each, the newest of their sequence, and compute
    ``decode_q_len`` of them: what the step before drafted follows it. ``drafts`` are to be made for the next step.
    ``waits``: runs read pages that are still being unpacked, each layer when it has come. For those who count what
    steps take: ``sparse`` says that a prompt is computed so, ``sparse_pairs`` about how many pairs there are then."""

    number: int
    ends: tuple[int, ...] = ()
    starts: tuple[Start, ...] = ()
    packs: tuple[Transfer, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    unpacks: tuple[Transfer, ...] = ()
    runs: tuple[Run, ...] = ()
    num_decodes: int = 0
    decode_q_len: int = 1
    samples: tuple[SampleRow, ...] = ()
    drafts: int = 0
    waits: bool = False
    sparse: bool = False
    sparse_pairs: float = 0.0

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs[self.num_decodes :])

    @property
    def num_prefill_pairs(self) -> int:
        """Pairs of a prompt token and one that it attends to."""
        prompts = ((len(run.tokens), run.start) for run in self.runs[self.num_decodes :])
        return sum(new * start + new * (new + 1) // 2 for new, start in prompts)

    @property
    def borders(self) -> list[int]:
        """Where each run begins among the step's tokens, and where the last ends."""
        decodes, prompts = self.runs[: self.num_decodes], self.runs[self.num_decodes :]
        counts = [self.decode_q_len] * len(decodes) + [len(run.tokens) for run in prompts]
        return [0, *itertools.accumulate(counts)]

    @property
    def sampled_places(self) -> list[int]:
        """The token behind which each sample comes: all of a decode, the last of a prompt."""
        borders, places = self.borders, list[int]()
        for row in self.samples:
            first = borders[row.run] if row.run < self.num_decodes else borders[row.run + 1] - 1
            places.extend(range(first, borders[row.run + 1]))
        return places


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of some tokens in a row: of the tokens themselves, and of the ``top`` likeliest at each place.

    ``chosen`` is float32 ``[tokens]``; ``top_tokens`` uint32 and ``top_logprobs`` float32, ``[tokens * top]``.
    """

    top: int
    chosen: array[float]
    top_tokens: array[int] = field(default_factory=lambda: array("I"))
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))

    def first(self, tokens: int) -> Logprobs:
        """Those of the first so many tokens."""
        end = tokens * self.top
        return Logprobs(self.top, self.chosen[:tokens], self.top_tokens[:end], self.top_logprobs[:end])


@dataclass(frozen=True, slots=True)
class Moved:
    """The packs or the unpacks of step ``step`` are over. ``checksums`` are the 64-bit linear ones, of whole objects
    whatever the number of ranks; 0 for those that were not to be summed."""

    step: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What rank 0 sampled, by row of ``StepPlan.samples``: ``tokens``, at least one each, and ``drafted``, the drafts
    that the row was given; log probabilities by sample row and by run.

    ``broken`` are the runs whose logits are no numbers, ``misfits`` those that their grammar has no way on for, and
    why; their tokens mean nothing. ``complete`` are the sample rows whose grammar ended with their last token.
    ``packed`` and ``unpacked`` are what ended of transfers, each in the order of steps; all that the runs waited for is
    among it.
    ``after_s``: seconds on the device from the end of the step before to this one's; None where it is not known.
    ``late_s``: seconds that a device had been done with the step when the host came to see it.
    """

    tokens: tuple[array[int], ...] = ()
    drafted: tuple[int, ...] = ()
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    broken: frozenset[int] = frozenset()
    misfits: dict[int, str] = field(default_factory=dict)
    complete: frozenset[int] = frozenset()
    packed: tuple[Moved, ...] = ()
    unpacked: tuple[Moved, ...] = ()
    after_s: float | None = None
    late_s: float = 0.0

    def seconds(self, at_most: float) -> float:
        """What the step took, by a host that saw it begin and end ``at_most`` apart. It began when it was launched or,
        if that is later, when the step before was over, which a host that launches the next one sees late."""
        return at_most if self.after_s is None else min(at_most, self.after_s)
