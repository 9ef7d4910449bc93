"""What rows of a decode step ask beyond temperature, filters and a seed, in tensors that never move.

A captured graph samples through them: penalties, biases and bans come in one copy, grammars' masks in another where a
row has one; log probabilities stay in them for the host. The tokens are those of the same rows sampled op by op.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from katydid_kernels.sample import LogitBias, Logprobs, Penalties, SamplingBatch
from torch import Tensor

from katydid_engine.batch_builder import Int32s
from katydid_engine.host_copies import integers, to_device
from katydid_engine.seen_tokens import SeenTokens
from katydid_engine.sequence_sampler import Limits, SequenceSampler

__all__ = ["MOST_TOP", "Asked", "LogitTerms"]

MOST_TOP = 20
"""Most top log probabilities of a row that a graph makes."""
_BIASES_A_TOKEN = 64
_FEWEST_BIASES = 1024


@dataclass(frozen=True, slots=True)
class Asked:
    """What a step's choice has to do beside sampling.

    Attributes:
        terms: adjust logits by penalties, biases and masks, count what is accepted, and tell log probabilities.
        parted: sample where each rank's part of the vocabulary is; rows ask for nothing else then.
        filters: with ``parted``, a row may have top_k, top_p or min_p.
    """

    terms: bool = False
    parted: bool = False
    filters: bool = False


class LogitTerms:
    """Of steps of up to ``rows`` rows of ``width`` samples.

    Args:
        seen: what penalties count; room for ``rows`` sequences is made in it.

    Attributes:
        logprobs: of the samples of the last step that asked, with the ``MOST_TOP`` likeliest of each.
    """

    def __init__(self, rows: int, width: int, vocab_size: int, seen: SeenTokens, device: torch.device) -> None:
        tokens = rows * width
        seen.reserve(rows)
        self._seen = seen
        self._device = device
        self._room = max(_FEWEST_BIASES, _BIASES_A_TOKEN * tokens)
        by_token = dict.fromkeys(("slots", "repetition", "presence", "frequency"), tokens)
        sizes = by_token | {"rows": rows, "starts": tokens + 1, "ids": self._room, "values": self._room}
        ends = itertools.accumulate(-(-size // 4) * 4 for size in sizes.values())
        self._places = {
            name: slice(end - -(-size // 4) * 4, end - -(-size // 4) * 4 + size)
            for (name, size), end in zip(sizes.items(), ends, strict=True)
        }
        self._ints = to_device(torch.from_numpy(self._blank()), device)
        self._allowed = torch.full((tokens, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
        self._masked = False
        top = min(MOST_TOP, vocab_size)
        # In one memory, which one copy takes to the host.
        whole = torch.zeros(1 + 2 * top, tokens, dtype=torch.int32, device=device)
        ids, values = whole[1 : 1 + top].view(tokens, top), whole[1 + top :].view(tokens, top)
        self.logprobs = Logprobs(whole[0].view(torch.float32), ids, values.view(torch.float32))

    def fit(self, samplers: Sequence[SequenceSampler], width: int) -> bool:
        """Whether a step of these rows has room here; on every rank of a group alike."""
        biases = width * sum(sampler.most_biases for sampler in samplers)
        tops = [sampler.sampling.logprobs or 0 for sampler in samplers]
        outgrown = self._seen.outgrown and any(sampler.penalises for sampler in samplers)
        return biases <= self._room and max(tops) <= self.logprobs.top.shape[1] and not outgrown

    def fill(self, samplers: Sequence[SequenceSampler], limits: Sequence[Sequence[Limits]]) -> None:
        """Copies what rows ask to the device.

        Args:
            limits: of each row at each of its positions.
        """
        width = len(limits[0])
        host, slots = self._blank(), self._seen.numbers(samplers)
        samplings = [sampler.sampling for sampler in samplers]
        flat = [bias for row in limits for bias, _ in row]
        counts = list(itertools.accumulate(map(len, flat)))
        columns = {
            "slots": np.repeat(np.array(slots, dtype=np.int32), width),
            "repetition": _bits([sampling.repetition_penalty for sampling in samplings], width),
            "presence": _bits([sampling.presence_penalty for sampling in samplings], width),
            "frequency": _bits([sampling.frequency_penalty for sampling in samplings], width),
            "rows": np.array(slots, dtype=np.int32),
            "ids": np.fromiter(itertools.chain.from_iterable(flat), dtype=np.int32),
            "values": np.fromiter((x for bias in flat for x in bias.values()), dtype=np.float32).view(np.int32),
        }
        for name, column in columns.items():
            start = self._places[name].start
            host[start : start + len(column)] = column
        starts = host[self._places["starts"]]
        starts[1 : 1 + len(counts)] = counts
        starts[1 + len(counts) :] = counts[-1]
        self._ints.copy_(to_device(torch.from_numpy(host), self._device))
        self._fill_masks([mask for row in limits for _, mask in row])

    def batch(self, plain: SamplingBatch, pending: Tensor | None) -> SamplingBatch:
        """The same memory whenever asked, for the samples of ``plain``; ``pending`` as `Penalties` has it."""
        tokens = len(plain.seeds)
        slots, repetition, presence, frequency = (
            self._part(name)[:tokens] for name in ("slots", "repetition", "presence", "frequency")
        )
        penalties = Penalties(
            slots=slots,
            repetition=repetition.view(torch.float32),
            presence=presence.view(torch.float32),
            frequency=frequency.view(torch.float32),
            seen=self._seen.table,
            pending=pending,
        )
        bias = LogitBias(
            self._part("starts")[: tokens + 1], self._part("ids"), self._part("values").view(torch.float32)
        )
        return replace(plain, penalties=penalties, bias=bias, allowed=self._allowed[:tokens])

    @property
    def counted(self) -> tuple[Tensor, Tensor]:
        """Which counts each row's accepted tokens add to, int32 ``[rows]``, and all of them: `verify_draft`'s slots and
        seen."""
        return self._part("rows"), self._seen.table

    def keep(self, found: Logprobs) -> None:
        """Log probabilities of a step's samples."""
        count = len(found.chosen)
        self.logprobs.chosen[:count].copy_(found.chosen)
        self.logprobs.top_ids[:count].copy_(found.top_ids)
        self.logprobs.top[:count].copy_(found.top)

    def wanted(self, samplers: Sequence[SequenceSampler], width: int) -> dict[int, Logprobs]:
        """Of what was kept, by row, as much as each asked."""
        found = self.logprobs
        return {
            row: Logprobs(
                found.chosen[row * width : (row + 1) * width],
                found.top_ids[row * width : (row + 1) * width, : sampler.sampling.logprobs],
                found.top[row * width : (row + 1) * width, : sampler.sampling.logprobs],
            )
            for row, sampler in enumerate(samplers)
            if sampler.sampling.logprobs is not None
        }

    def _fill_masks(self, masks: Sequence[Tensor | None]) -> None:
        if self._masked:
            self._allowed.fill_(-1)
        places = [place for place, mask in enumerate(masks) if mask is not None]
        self._masked = bool(places)
        if places:
            rows = torch.cat([mask for mask in masks if mask is not None])
            self._allowed[integers(places, self._device, torch.int64)] = to_device(rows, self._device)

    def _blank(self) -> Int32s:
        """What the host says of rows that ask nothing."""
        host: Int32s = np.zeros(self._places["values"].stop, dtype=np.int32)
        for name in ("slots", "rows"):
            host[self._places[name]] = -1
        host[self._places["repetition"]] = np.float32(1.0).view(np.int32)
        return host

    def _part(self, name: str) -> Tensor:
        return self._ints[self._places[name]]


def _bits(values: Sequence[float], width: int) -> Int32s:
    """Of fp32, each value ``width`` times."""
    return np.repeat(np.array(values, dtype=np.float32), width).view(np.int32)
