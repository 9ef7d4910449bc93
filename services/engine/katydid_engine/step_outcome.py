"""A step that was launched: what comes of it reaches the host later, and is then told as the plan's output.

On a GPU a step is launched while those before it still run. Its tokens are copied to page-locked memory behind it; an
event says when they are there. On a host they are there at once.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from katydid_kernels.sample import Logprobs as DeviceLogprobs
from torch import Tensor

from katydid_engine.host_copies import Arriving, together_to_host
from katydid_engine.plan import Logprobs, Moved, StepOutput, StepPlan
from katydid_engine.sampler import joined_logprobs
from katydid_engine.sequence_sampler import SequenceSampler

__all__ = ["Launched", "Left", "RowsLeft"]


@dataclass(frozen=True, slots=True)
class Left:
    """What a step leaves on the device for the host, R rows of at most Q samples.

    Attributes:
        tokens: int32 ``[R, Q]``.
        accepted, positions: int32 ``[R]``, as `Sampled` has them.
        drafts: int32 ``[R, D]``; None without any.
        sound: bool ``[R, Q]``, whether the logits of each sample are numbers.
    """

    tokens: Tensor
    accepted: Tensor
    positions: Tensor
    drafts: Tensor | None
    sound: Tensor

    def on_host(self) -> Left:
        """Under way; the tensors are not to be read before they have arrived."""
        drafts = [] if self.drafts is None else [self.drafts]
        tokens, accepted, positions, sound, *drafts = together_to_host(
            [self.tokens, self.accepted, self.positions, self.sound, *drafts]
        )
        return Left(tokens, accepted, positions, drafts[0] if drafts else None, sound)


@dataclass(frozen=True, slots=True)
class RowsLeft:
    """``left`` and whose rows these are: the run and the sampler of each, whether it is the run's own sequence, how
    many drafts it was given, and log probabilities of rows that asked."""

    left: Left
    runs: Sequence[int]
    samplers: Sequence[SequenceSampler]
    owned: Sequence[bool]
    num_drafts: Sequence[int]
    logprobs: dict[int, DeviceLogprobs]


class Launched:
    """``output`` of a plan, once, in the order of plans: samplers go on with what their sequences got.

    Args:
        rows: None where nothing is sampled or this rank does not tell.
        prompt_logprobs: of the runs that asked, in parts.
        check: asked when the device is done with the step.
        before: the step before.
        over: tells the packs and unpacks that have ended when the step has (`PageMover.over`).
    """

    def __init__(
        self,
        plan: StepPlan,
        device: torch.device,
        *,
        rows: RowsLeft | None = None,
        prompt_logprobs: dict[int, list[DeviceLogprobs]] | None = None,
        over: Callable[[StepPlan], tuple[tuple[Moved, ...], tuple[Moved, ...]]],
        check: Callable[[], None] | None = None,
        before: Launched | None = None,
    ) -> None:
        self.plan = plan
        self._rows = rows
        self._left = None if rows is None else rows.left.on_host()
        self._logprobs = {} if rows is None else dict(zip(rows.logprobs, _on_host(rows.logprobs.values()), strict=True))
        self._prompts = {run: _on_host(parts) for run, parts in (prompt_logprobs or {}).items()}
        self._over = over
        self._check = check
        self._arriving = Arriving(device)
        self._before = None if before is None else before._arriving
        self._output: StepOutput | None = None

    @property
    def left(self) -> Left:
        """On the host, arrived. Only of a step that sampled."""
        self._arriving.wait()
        assert self._left is not None
        return self._left

    def output(self) -> StepOutput:
        """Waits for the step. Called again it says the same. Raises what ``check`` does."""
        if self._output is None:
            self._arriving.wait()
            if self._check is not None:
                self._check()
            after_s = None if self._before is None else self._arriving.seconds_since(self._before)
            done_at = self._arriving.done_at(self._before)
            told = self._told()
            late_s = 0.0 if done_at is None else time.monotonic() - done_at
            self._output, self._before = replace(told, after_s=after_s, late_s=late_s), None
        return self._output

    def _told(self) -> StepOutput:
        prompts = {run: joined_logprobs(parts) for run, parts in self._prompts.items()}
        packed, unpacked = self._over(self.plan)
        if self._rows is None or self._left is None:
            return StepOutput(prompt_logprobs=prompts, packed=packed, unpacked=unpacked)
        tokens: list[array[int]] = []
        logprobs: dict[int, Logprobs] = {}
        misfits: dict[int, str] = {}
        broken, complete = set(), set()
        owned, samplers = self._rows.owned, self._rows.samplers
        counts, sound = self._left.accepted.tolist(), self._left.sound.tolist()
        for row, own in enumerate(self._left.tokens.tolist()):
            sampler, run = samplers[row], self._rows.runs[row]
            if owned[row]:
                accepted, ends = sampler.accept(array("I", own[: counts[row]]))
            else:
                accepted, ends = array("I", own[:1]), sampler.would_end(own[0])
            tokens.append(accepted)
            if ends:
                complete.add(row)
            if sampler.misfit:
                misfits[run] = sampler.misfit
            if not all(sound[row]):
                broken.add(run)
            if row in self._logprobs:
                logprobs[row] = joined_logprobs([self._logprobs[row]]).first(len(accepted))
        return StepOutput(
            tuple(tokens),
            tuple(self._rows.num_drafts),
            logprobs,
            prompts,
            frozenset(broken),
            misfits,
            frozenset(complete),
            packed,
            unpacked,
        )


def _on_host(results: Iterable[DeviceLogprobs]) -> list[DeviceLogprobs]:
    """Under way."""
    found = iter(together_to_host([part for of in results for part in (of.chosen, of.top_ids, of.top)]))
    return [DeviceLogprobs(*parts) for parts in zip(found, found, found, strict=True)]
