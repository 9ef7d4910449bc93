"""A runner on paper: pages hold, for every token, a digest of its whole prefix, so that reading any wrong page shows.

It carries out plans exactly as a rank does and checks, before each sample, that the pages of the sequence hold what
that sequence's own tokens would have written. The sampled token depends on the prefix, the seed and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from katydid_engine.plan import Logprobs, Run, StepOutput, StepPlan
from katydid_engine.request import FinishReason, Request

VOCAB = 50
PAGE = 64


def digests(tokens: Iterable[int]) -> list[int]:
    out, state = [], 17
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (2**61 - 1)
        out.append(state)
    return out


def checksum(slot: list[int]) -> int:
    return sum((place + 1) * value for place, value in enumerate(slot)) % 2**64 or 1


def sample(tokens: Iterable[int], seed: int) -> int:
    return (digests(tokens)[-1] ^ (seed * 7919)) % VOCAB


def expected_output(
    request: Request, choice: int, eos: frozenset[int], max_model_tokens: int
) -> tuple[list[int], FinishReason]:
    """What a request must produce, and how it must end, computed from the request alone."""
    sampling = request.sampling
    tokens = [*request.prompt, *request.generated]
    output = list(request.generated)
    while True:
        token = sample(tokens, sampling.seed + choice)
        tokens.append(token)
        output.append(token)
        stops = token in sampling.stop_token_ids or (token in eos and not sampling.ignore_eos)
        if stops and len(output) >= sampling.min_tokens:
            return output[len(request.generated) :], FinishReason.STOP
        if len(output) >= sampling.max_tokens or len(tokens) >= max_model_tokens:
            return output[len(request.generated) :], FinishReason.LENGTH


@dataclass
class State:
    """What a rank knows of a sequence: the computed tokens, those sampled since, and drafts behind them."""

    table: list[int]
    tokens: list[int]
    seed: int
    sampled: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    step: int = -1


class PaperRunner:
    """Drafts are right about two times in three."""

    def __init__(self, num_pages: int, num_slots: int = 0) -> None:
        self.pages = [[0] * PAGE for _ in range(num_pages)]
        self.slots = [[0] * PAGE for _ in range(num_slots)]
        self.sequences: dict[int, State] = {}
        self.accepted = 0
        self._sampled_step = 0
        self._written: set[tuple[int, int]] = set()

    def run(self, plan: StepPlan) -> StepOutput:
        for sequence in plan.ends:
            del self.sequences[sequence]
        for start in plan.starts:
            assert start.sequence not in self.sequences
            self.sequences[start.sequence] = State([], list(start.tokens), start.sampling.seed)
        for move in plan.packs:
            self.slots[move.slot] = self.pages[move.page][:]
        packed = tuple(checksum(self.slots[move.slot]) * move.summed for move in plan.packs)
        for copy in plan.copies:
            self.pages[copy.target] = self.pages[copy.source][:]
        for move in plan.unpacks:
            self.pages[move.page] = self.slots[move.slot][:]
        unpacked = tuple(checksum(self.slots[move.slot]) * move.summed for move in plan.unpacks)
        self._written = set()
        prompt_logprobs = {}
        choices: dict[int, int] = {}
        for row in plan.samples:
            choices.setdefault(row.run, row.choice)
        results: dict[int, list[int]] = {}
        drafted: dict[int, int] = {}
        for index, run in enumerate(plan.runs):
            state = self.sequences[run.sequence]
            assert run.table_from <= len(state.table)
            state.table[run.table_from :] = run.pages
            if index < plan.num_decodes:
                results[index], drafted[index] = self._decode(plan, run, state, choices[index])
            else:
                self._prefill(run, state)
                drafted[index] = 0
            if run.prompt_targets:
                prompt_logprobs[index] = Logprobs(0, array("f", run.prompt_targets))
        tokens = []
        for row in plan.samples:
            state = self.sequences[plan.runs[row.run].sequence]
            own = results.get(row.run) or [sample(state.tokens, state.seed + row.choice)]
            tokens.append(array("I", own))
            if row.choice == choices[row.run]:
                self._end_step(plan, state, own, row.choice)
        if plan.runs:
            self._sampled_step = plan.number
        counts = tuple(drafted[row.run] for row in plan.samples)
        return StepOutput(tuple(tokens), counts, {}, prompt_logprobs, packed=packed, unpacked=unpacked)

    def _prefill(self, run: Run, state: State) -> None:
        end = run.start + len(run.tokens)
        del state.tokens[run.start :]
        state.tokens.extend(run.tokens)
        assert len(state.tokens) == end, "the run does not continue the sequence's tokens"
        if run.writes:
            self._write(state, state.tokens, run.start)
        self._check(state, end)

    def _decode(self, plan: StepPlan, run: Run, state: State, choice: int) -> tuple[list[int], int]:
        assert len(run.tokens) == 1
        continued = state.step == self._sampled_step and bool(state.sampled)
        if run.ahead:
            assert continued, "the step before did not sample this sequence"
            assert len(state.tokens) + len(state.sampled) - 1 <= run.start, "more tokens came than were assumed"
            known = state.tokens + state.sampled
        else:
            if state.sampled:
                assert [*state.tokens, *state.sampled][run.start :] == list(run.tokens), "not what was sampled last"
            known = [*(state.tokens + state.sampled)[: run.start], *run.tokens]
            assert len(known) == run.start + 1
        drafts = state.drafts[: plan.decode_q_len - 1] if continued else []
        inputs = known + drafts + [0] * (plan.decode_q_len - 1 - len(drafts))
        self._write(state, inputs, len(known) - 1)
        self._check(replace(state, tokens=known), len(known))
        own = []
        for place in range(len(drafts) + 1):
            own.append(sample(inputs[: len(known) + place], state.seed + choice))
            if place < len(drafts) and own[-1] != drafts[place]:
                break
        self.accepted += len(own) - 1
        state.tokens = known + own[:-1]
        state.sampled = own[-1:]
        return own, len(drafts)

    def _end_step(self, plan: StepPlan, state: State, own: list[int], choice: int) -> None:
        state.sampled = own[-1:]
        state.step = plan.number
        state.drafts = []
        for _ in range(plan.drafts):
            so_far = state.tokens + state.sampled + state.drafts
            right = sample(so_far, state.seed + choice)
            state.drafts.append(right if digests(so_far)[-1] % 3 else (right + 1) % VOCAB)

    def _write(self, state: State, tokens: list[int], start: int) -> None:
        values = digests(tokens)
        for position in range(start, len(tokens)):
            if position >= PAGE * len(state.table):
                break  # drafts that the sequence has no pages for
            page, offset = state.table[position // PAGE], position % PAGE
            assert (page, offset) not in self._written, "two sequences write one slot in one step"
            self._written.add((page, offset))
            self.pages[page][offset] = values[position]

    def _check(self, state: State, end: int) -> None:
        for position, value in enumerate(digests(state.tokens[:end])):
            page = state.table[position // PAGE]
            assert self.pages[page][position % PAGE] == value, f"wrong KV at {position}"
