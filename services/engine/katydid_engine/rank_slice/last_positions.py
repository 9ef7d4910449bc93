"""A request that goes to the model's last position: the chunk of its prompt behind everything else, decodes until no
position is left, and the same positions computed again as a prompt, which must say the same.

What rounds otherwise moves the tokens of deep models with weights of no checkpoint; so the same is measured at a
position in front, where as many must differ.
"""

from __future__ import annotations

import operator
import statistics
import time
from array import array
from dataclasses import replace
from typing import Any

from katydid_engine.plan import Run, SampleRow, Start, StepPlan
from katydid_engine.rank_slice.measure import prefix
from katydid_engine.rank_slice.steps import SliceSteps
from katydid_engine.request import Sampling, pages_for

__all__ = ["measure_last_positions"]

_DECODES = 32
_AGAIN = 128
_REPEATS = 3
_SAMPLE = (SampleRow(0, 0),)
_NO_PAGES = array("I")


def measure_last_positions(
    steps: SliceSteps, chunk: int, *, most: int | None = None, sparse: bool = False
) -> dict[str, Any]:
    """A row of a results file: seconds of the last ``chunk`` tokens of a prompt that leaves room for 32 decodes, what
    stands before it being what the pages hold. Positions end at ``most``, by default the model's last; 256 at least.

    The row tells besides: a decode step's seconds; at how many places a prompt of these tokens has the decoded one as
    its likeliest, and how much less likely it is at most (natural logarithm).
    """
    most = most or steps.slice.options.config.max_positions
    length, ids = most - _DECODES, array("I", steps.slice.token_ids(most))
    sequence = steps.next_sequence()
    start = Start(sequence, Sampling(ignore_eos=True, temperature=0.0), length, ids[:length], sparse_prefill=sparse)
    of_chunk = Run(sequence, length - chunk, ids[length - chunk : length], 0, array("I", range(pages_for(most))))
    seconds = []
    for starts in ((start,), *[()] * _REPEATS):
        token, took = _run(steps, of_chunk, starts=starts)
        seconds.append(took)
    tokens, decodes = array("I", [token]), []
    for position in range(length, most):
        token, took = _run(steps, _run_of(sequence, position, tokens[-1:], most), decodes=1)
        tokens.append(token)
        decodes.append(took)
    # What follows positions length - 1 to most - 1, once more.
    again = array("I", [*ids[length - _AGAIN : length], *tokens[:-1]])
    whole = replace(
        _run_of(sequence, most - len(again), again, most), prompt_top=1, prompt_row=_AGAIN - 1, prompt_targets=tokens
    )
    told = steps.runner.run(StepPlan(0, runs=(whole,), samples=_SAMPLE)).prompt_logprobs[0]
    steps.runner.run(StepPlan(0, ends=(sequence,)))
    return {
        "figure": f"{prefix(steps.slice)}: last {chunk} tokens of a prompt of {length}" + ", sparse" * sparse,
        "value": statistics.median(seconds[1:]),
        "unit": "s",
        "decode_s": statistics.median(decodes),
        "last_position": most - 1,
        "places": len(tokens),
        "same": sum(map(operator.eq, told.top_tokens, tokens)),
        "less_likely_at_most": max(map(operator.sub, told.top_logprobs, told.chosen)),
    }


def _run_of(sequence: int, first: int, tokens: array[int], most: int) -> Run:
    """Of a sequence that has pages for ``most`` tokens."""
    return Run(sequence, first, tokens, pages_for(most), _NO_PAGES)


def _run(steps: SliceSteps, run: Run, *, starts: tuple[Start, ...] = (), decodes: int = 0) -> tuple[int, float]:
    """The token that follows, and seconds."""
    steps.synchronize()
    began = time.perf_counter()
    output = steps.runner.run(StepPlan(0, starts=starts, runs=(run,), num_decodes=decodes, samples=_SAMPLE))
    return output.tokens[0][0], time.perf_counter() - began
