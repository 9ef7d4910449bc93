"""Log probabilities of a prompt's own tokens, for the runs of a step that ask."""

from __future__ import annotations

from katydid_kernels.sample import Logprobs, logprobs
from torch import Tensor

from katydid_engine.host_copies import integers
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.plan import StepPlan

__all__ = ["prompt_logprobs"]

_ROWS = 128


def prompt_logprobs(plan: StepPlan, hidden: Tensor, model: DecoderLM) -> dict[int, list[Logprobs]]:
    """By run; in slices, because logits of a whole chunk would be large. ``hidden``: of all the step's tokens."""
    results: dict[int, list[Logprobs]] = {}
    for index, (run, border) in enumerate(zip(plan.runs, plan.borders, strict=False)):
        for first in range(0, len(run.prompt_targets), _ROWS):
            targets = run.prompt_targets[first : first + _ROWS]
            start = border + run.prompt_row + first
            logits = model.logits(hidden[start : start + len(targets)])
            part = logprobs(logits, integers(targets, logits.device), run.prompt_top)
            results.setdefault(index, []).append(part)
    return results
