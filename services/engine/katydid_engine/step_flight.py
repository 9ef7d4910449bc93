"""A step between its plan and its commit, and the runs of which it is made."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from katydid_runtime.block_hash import BLOCK_TOKENS

from katydid_engine.plan import Run, Start, StepPlan
from katydid_engine.request import Sequence

__all__ = ["StepFlight", "decode_run", "prefill_run", "start_of"]


@dataclass(frozen=True, slots=True)
class StepFlight:
    """``sequences`` are those of the plan's runs, ``stays`` how often each had left its pages when it was planned."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    stays: tuple[int, ...]

    def sequence(self, run: int) -> Sequence | None:
        """The sequence of a run; None when it has left since."""
        sequence = self.sequences[run]
        return sequence if sequence.stay == self.stays[run] else None


def start_of(sequence: Sequence) -> Start:
    request = sequence.request
    return Start(sequence.id, request.sampling, sequence.num_prompt, sequence.tokens[:], request.sparse_prefill)


def decode_run(sequence: Sequence) -> Run:
    """The newest token of a sequence, which may still be coming."""
    start = sequence.num_tokens + sequence.num_coming - 1
    ahead = sequence.num_coming > 0
    table_from, sequence.pages_sent = sequence.pages_sent, len(sequence.pages)
    return Run(
        sequence=sequence.id,
        start=start,
        tokens=array("I", (0,)) if ahead else sequence.tokens[-1:],
        table_from=table_from,
        pages=array("I", sequence.pages[table_from:]),
        ahead=ahead,
    )


def prefill_run(sequence: Sequence, count: int) -> Run:
    """The next ``count`` tokens of a sequence, and its block table as far as the runner does not know it."""
    start, end = sequence.num_scheduled, sequence.num_scheduled + count
    table_from, sequence.pages_sent = sequence.pages_sent, len(sequence.pages)
    first_target, targets = start + 1, array("I")
    if sequence.wants_prompt_logprobs:
        first_target = max(first_target, sequence.live.prompt_tokens_reported)
        targets = sequence.tokens[first_target : min(end + 1, sequence.num_prompt)]
    return Run(
        sequence=sequence.id,
        start=start,
        tokens=sequence.tokens[start:end],
        table_from=table_from,
        pages=array("I", sequence.pages[table_from:]),
        writes=end > sequence.num_published * BLOCK_TOKENS,
        next_token=sequence.tokens[end] if end < sequence.num_tokens else -1,
        prompt_top=sequence.request.sampling.prompt_logprobs or 0,
        prompt_row=first_target - 1 - start,
        prompt_targets=targets,
    )
