"""A runner on paper: pages hold, for every token, a digest of its whole prefix, so that reading any wrong page shows.

It carries out plans exactly as a rank does and checks, before each sample, that the pages of the sequence hold what
that sequence's own tokens would have written. The sampled token depends on the prefix, the seed and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from katydid_engine.plan import Logprobs, Moved, Run, StepOutput, StepPlan, Transfer
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
    """Drafts are right about two times in three. Transfers are over with their step, or ``lingers`` says of each step
    whether those under way go on beside it: then nothing of their pages or slots is there before they are over.

    What is computed from ``spoiled`` pages is wrong, so that it shows if it is told: those unpacked from ``bad`` slots.
    """

    def __init__(self, num_pages: int, num_slots: int = 0, lingers: Callable[[], bool] = lambda: False) -> None:
        self.pages = [[0] * PAGE for _ in range(num_pages)]
        self.slots = [[0] * PAGE for _ in range(num_slots)]
        self.sequences: dict[int, State] = {}
        self.accepted = 0
        self.bad: set[int] = set()
        self.spoiled: set[int] = set()
        self.packing: list[tuple[int, tuple[Transfer, ...]]] = []
        self.unpacking: list[tuple[int, tuple[Transfer, ...]]] = []
        self._lingers = lingers
        self._sampled_step = 0
        self._written: set[tuple[int, int]] = set()

    def run(self, plan: StepPlan) -> StepOutput:
        for sequence in plan.ends:
            del self.sequences[sequence]
        for start in plan.starts:
            assert start.sequence not in self.sequences
            self.sequences[start.sequence] = State([], list(start.tokens), start.sampling.seed)
        if plan.packs:
            self.packing.append((plan.number, plan.packs))
        if plan.unpacks:
            self.unpacking.append((plan.number, plan.unpacks))
        lingers = self._lingers()
        packed = () if lingers else tuple(self._pack(*self.packing.pop(0)) for _ in self.packing[:])
        for copy in plan.copies:
            self.pages[copy.target] = self.pages[copy.source][:]
            (self.spoiled.add if copy.source in self.spoiled else self.spoiled.discard)(copy.target)
        ended = self.unpacking[: None if plan.waits or not lingers else 0]
        unpacked = tuple(self._unpack(*self.unpacking.pop(0)) for _ in ended)
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
                drafted[index] = 0
                if not self._prefill(run, state):
                    results[index] = [(sample(state.tokens, state.seed) + 1) % VOCAB]
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

    def _pack(self, step: int, transfers: tuple[Transfer, ...]) -> Moved:
        for move in transfers:
            self.slots[move.slot] = self.pages[move.page][:]
        return Moved(step, tuple(checksum(self.slots[move.slot]) * move.summed for move in transfers))

    def _unpack(self, step: int, transfers: tuple[Transfer, ...]) -> Moved:
        for move in transfers:
            self.pages[move.page] = self.slots[move.slot][:]
            (self.spoiled.add if move.slot in self.bad else self.spoiled.discard)(move.page)
        return Moved(step, tuple(checksum(self.slots[move.slot]) * move.summed for move in transfers))

    def _prefill(self, run: Run, state: State) -> bool:
        """Whether it has read what was right."""
        end = run.start + len(run.tokens)
        del state.tokens[run.start :]
        state.tokens.extend(run.tokens)
        assert len(state.tokens) == end, "the run does not continue the sequence's tokens"
        if run.writes:
            self._write(state, state.tokens, run.start)
        return self._check(state, end)

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
        right = self._check(replace(state, tokens=known), len(known))
        own = []
        for place in range(len(drafts) + 1):
            own.append((sample(inputs[: len(known) + place], state.seed + choice) + (not right)) % VOCAB)
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
            if offset == 0:
                self.spoiled.discard(page)
            self.pages[page][offset] = values[position]

    def _check(self, state: State, end: int) -> bool:
        right = True
        for position, value in enumerate(digests(state.tokens[:end])):
            page = state.table[position // PAGE]
            right = right and page not in self.spoiled
            assert self.pages[page][position % PAGE] == value or not right, f"wrong KV at {position}"
        return right
