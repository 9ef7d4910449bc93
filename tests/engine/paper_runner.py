"""A runner on paper: pages hold, for every token, a digest of its whole prefix, so that reading any wrong page shows.

It carries out plans exactly as a rank does and checks, before each sample, that the pages of the sequence hold what
that sequence's own tokens would have written. The sampled token depends on the prefix, the seed and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from katydid_engine.plan import Logprobs, StepOutput, StepPlan
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


class PaperRunner:
    def __init__(self, num_pages: int, num_slots: int = 0) -> None:
        self.pages = [[0] * PAGE for _ in range(num_pages)]
        self.slots = [[0] * PAGE for _ in range(num_slots)]
        self.sequences: dict[int, tuple[list[int], list[int], int]] = {}

    def run(self, plan: StepPlan) -> StepOutput:
        for sequence in plan.ends:
            del self.sequences[sequence]
        for start in plan.starts:
            assert start.sequence not in self.sequences
            self.sequences[start.sequence] = ([], list(start.tokens), start.sampling.seed)
        for move in plan.packs:
            self.slots[move.slot] = self.pages[move.page][:]
        packed = tuple(checksum(self.slots[move.slot]) * move.summed for move in plan.packs)
        for copy in plan.copies:
            self.pages[copy.target] = self.pages[copy.source][:]
        for move in plan.unpacks:
            self.pages[move.page] = self.slots[move.slot][:]
        unpacked = tuple(checksum(self.slots[move.slot]) * move.summed for move in plan.unpacks)
        written: set[tuple[int, int]] = set()
        prompt_logprobs = {}
        for index, run in enumerate(plan.runs):
            table, tokens, _ = self.sequences[run.sequence]
            assert run.table_from <= len(table)
            table[run.table_from :] = run.pages
            end = run.start + len(run.tokens)
            del tokens[run.start :]
            tokens.extend(run.tokens)
            assert len(tokens) == end, "the run does not continue the sequence's tokens"
            assert (index < plan.num_decodes) <= (len(run.tokens) == 1)
            values = digests(tokens)
            for position in range(run.start, end):
                page, offset = table[position // PAGE], position % PAGE
                if run.writes:
                    assert (page, offset) not in written, "two sequences write one slot in one step"
                    written.add((page, offset))
                    self.pages[page][offset] = values[position]
            if run.prompt_targets:
                prompt_logprobs[index] = Logprobs(0, array("f", run.prompt_targets))
        for run in plan.runs:
            table, tokens, _ = self.sequences[run.sequence]
            values = digests(tokens)
            for position, value in enumerate(values):
                assert self.pages[table[position // PAGE]][position % PAGE] == value, f"wrong KV at {position}"
        sampled = []
        for row in plan.samples:
            _, tokens, seed = self.sequences[plan.runs[row.run].sequence]
            sampled.append(sample(tokens, seed + row.choice))
        return StepOutput(tuple(sampled), {}, prompt_logprobs, packed=packed, unpacked=unpacked)
