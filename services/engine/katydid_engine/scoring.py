"""A model in this process, asked directly: scores, greedy continuations and how its draft layer would have fared.

No scheduler, no step loop. What `katydid eval --in-process` runs, and what parity tests and
probes of a kernel's effect on answers build on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from katydid_runtime.errors import InvalidRequestError, PromptTooLongError, UnsupportedError
from torch import Tensor

from katydid_engine.forward_batch import PAGE_SIZE, ForwardBatch, PrefillChunk, TokenRun
from katydid_engine.kv_cache import KvCache
from katydid_engine.loader import load_model
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.models.hy_v3 import HyV3
from katydid_engine.sparse_prefill import SparsePrefill

__all__ = ["Continuation", "ModelScorer", "TokenScores"]

_CHUNK = 2048  # tokens of one prefill step
_LOGIT_ROWS = 512


@dataclass(frozen=True, slots=True)
class TokenScores:
    """For each id after the first: natural log probability, and whether it was the likeliest token."""

    logprobs: list[float]
    greedy: list[bool]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Greedy tokens without the stop token; of `steps` draft chains, accepted[d] had d + 1 right tokens or more."""

    ids: list[int]
    steps: int
    accepted: list[int]


class ModelScorer:
    """One model folder on one device.

    Attributes:
        vocabulary: number of token ids.
        max_length: longest sequence, in tokens.
        drafts: whether the model has a draft layer.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        quantization: str = "auto",
        kv_cache_dtype: str = "auto",
        sparse_prefill: SparsePrefill | None = None,
    ) -> None:
        self.model: DecoderLM = load_model(
            folder, device=device, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype
        )
        if sparse_prefill is not None:
            self.model.use_sparse_prefill(sparse_prefill)
        self.vocabulary = self.model.config.vocab_size
        self.max_length = self.model.config.max_positions
        self.drafts = isinstance(self.model, HyV3) and self.model.config.num_mtp_layers > 0

    @classmethod
    def open(
        cls, folder: Path, device: str, dtype: str, quantization: str = "auto", kv_cache_dtype: str = "auto"
    ) -> ModelScorer:
        """From words, as the engine's settings of these names take them; device "cpu" or "cuda".

        Raises:
            InvalidRequestError: another word.
            ModelFolderError: the folder holds no whole model.
            SettingsError: the model is quantised otherwise than asked.
        """
        words = (
            ("device", device, ("cpu", "cuda")),
            ("dtype", dtype, ("auto", "float32", "bfloat16", "float16")),
            ("quantization", quantization, ("auto", "fp8", "w4a8")),
            ("kv_cache_dtype", kv_cache_dtype, ("auto", "fp8")),
        )
        for name, value, allowed in words:
            if value not in allowed:
                raise InvalidRequestError(f"{name} is {value!r}", field=name, value=value, allowed=", ".join(allowed))
        return cls(
            folder,
            device=device,
            dtype=None if dtype == "auto" else getattr(torch, dtype),
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
        )

    def score(self, ids: Sequence[int]) -> TokenScores:
        """Scores ids[1:].

        Raises:
            InvalidRequestError: fewer than two ids, or an id outside the vocabulary.
            PromptTooLongError: more ids than the model has positions.
        """
        return self.score_many([ids])[0]

    def score_many(self, sequences: Sequence[Sequence[int]]) -> list[TokenScores]:
        """As ``score`` of each. Whole pages that all of them begin with are computed once, and what follows side by
        side: answers to one question cost little more than one of them.

        Raises:
            InvalidRequestError, PromptTooLongError: as ``score``.
        """
        if not sequences:
            return []
        for ids in sequences:
            self._check(ids, at_least=2)
        shared = _shared_tokens(sequences)
        tails = [-(-(len(ids) - shared) // PAGE_SIZE) for ids in sequences]
        if not shared:
            cache = self.model.new_kv_cache(sum(tails))
            hidden = self._tails(sequences, 0, tails, cache)
            return [self._scores(rows[:-1], ids[1:]) for rows, ids in zip(hidden, sequences, strict=True)]
        prefix, cache = self._prefill(sequences[0][:shared], room=sum(tails) * PAGE_SIZE)
        before = self._scores(prefix[:-1], sequences[0][1:shared])
        scores = []
        for ids, rows in zip(sequences, self._tails(sequences, shared, tails, cache), strict=True):
            after = self._scores(torch.cat((prefix[-1:], rows[:-1])), ids[shared:])
            scores.append(TokenScores(before.logprobs + after.logprobs, before.greedy + after.greedy))
        return scores

    def _tails(
        self, sequences: Sequence[Sequence[int]], shared: int, pages: Sequence[int], cache: KvCache
    ) -> list[Tensor]:
        """Hidden states ``[len(ids) - shared, hidden]`` of sequences whose first ``shared`` tokens lie in the first
        pages, and which have so many more."""
        found: list[list[Tensor]] = [[] for _ in sequences]
        some: list[tuple[int, TokenRun]] = []

        def compute() -> None:
            batch = ForwardBatch.pack([run for _, run in some], device=self.model.device)
            chunks = [(len(run.token_ids), run.start + len(run.token_ids), len(sequences[at])) for at, run in some]
            hidden = self.model.forward(replace(batch, prefills=tuple(PrefillChunk(*one) for one in chunks)), cache)
            for (at, _), rows in zip(some, torch.split(hidden, [new for new, _, _ in chunks]), strict=True):
                found[at].append(rows)
            some.clear()

        room, end = _CHUNK, shared // PAGE_SIZE
        for at, (ids, count) in enumerate(zip(sequences, pages, strict=True)):
            table = [*range(shared // PAGE_SIZE), *range(end, end := end + count)]
            for start in range(shared, len(ids), _CHUNK):
                piece = ids[start : start + _CHUNK]
                if len(piece) > room:
                    compute()
                    room = _CHUNK
                some.append((at, TokenRun(piece, start, table)))
                room -= len(piece)
        compute()
        return [torch.cat(parts) for parts in found]

    def _scores(self, hidden: Tensor, ids: Sequence[int]) -> TokenScores:
        """Of the ids that follow the rows of ``hidden``."""
        wanted = torch.tensor(ids, device=hidden.device)
        logprobs: list[float] = []
        greedy: list[bool] = []
        for start in range(0, len(ids), _LOGIT_ROWS):
            rows = slice(start, start + _LOGIT_ROWS)
            logits = self.model.logits(hidden[rows])
            logprobs += logits.log_softmax(-1).gather(1, wanted[rows, None]).squeeze(1).tolist()
            greedy += (logits.argmax(-1) == wanted[rows]).tolist()
        return TokenScores(logprobs, greedy)

    def generate(
        self, ids: Sequence[int], max_tokens: int, stop: Sequence[int] = (), draft_depth: int = 0
    ) -> Continuation:
        """Continues greedily until `max_tokens` or a stop id; replays draft chains of `draft_depth` over the result.

        Raises:
            InvalidRequestError: no ids, or an id outside the vocabulary.
            PromptTooLongError: ids and max_tokens exceed the model's positions.
            UnsupportedError: draft_depth > 0 and the model has no draft layer.
        """
        self._check(ids, at_least=1, room=max_tokens)
        if draft_depth and not self.drafts:
            raise UnsupportedError(
                "the model has no draft layer", field="draft_depth", value=draft_depth, allowed="0 for this model"
            )
        hidden, cache = self._prefill(ids, room=max_tokens)
        sequence, rows = list(ids), [hidden]
        while len(sequence) - len(ids) < max_tokens:
            token = int(self.model.logits(rows[-1][-1:]).argmax())
            if token in stop:
                break
            sequence.append(token)
            rows.append(self.model.forward(self._batch([token], len(sequence) - 1, cache, decode=True), cache))
        if not draft_depth:
            return Continuation(sequence[len(ids) :], 0, [])
        steps, accepted = self._replay(sequence, len(ids), torch.cat(rows), cache, draft_depth)
        return Continuation(sequence[len(ids) :], steps, accepted)

    def _check(self, ids: Sequence[int], *, at_least: int, room: int = 0) -> None:
        if len(ids) < at_least:
            raise InvalidRequestError(
                f"ids has {len(ids)} tokens, at least {at_least} are needed",
                field="ids",
                allowed=f">= {at_least} tokens",
            )
        if len(ids) + room > self.max_length:
            raise PromptTooLongError(
                f"{len(ids)} tokens and {room} more exceed the model's {self.max_length} positions",
                field="ids",
                value=len(ids) + room,
                allowed=f"<= {self.max_length}",
            )
        for token in (min(ids), max(ids)):
            if not 0 <= token < self.vocabulary:
                raise InvalidRequestError(
                    f"token id {token} is outside the model's vocabulary of {self.vocabulary}",
                    field="ids",
                    value=token,
                    allowed=f"0 to {self.vocabulary - 1}",
                )

    def _batch(self, tokens: Sequence[int], start: int, cache: KvCache, *, decode: bool = False) -> ForwardBatch:
        run = TokenRun(tokens, start, range(cache.num_pages))
        return ForwardBatch.pack([run], num_decodes=int(decode), device=self.model.device)

    def _prefill(self, ids: Sequence[int], room: int = 0) -> tuple[Tensor, KvCache]:
        """Hidden states [len(ids), hidden] and the pages that hold the ids, with space for `room` more."""
        cache = self.model.new_kv_cache(-(-(len(ids) + room) // PAGE_SIZE))
        hidden = []
        for start in range(0, len(ids), _CHUNK):
            batch = self._batch(ids[start : start + _CHUNK], start, cache)
            chunk = PrefillChunk(batch.num_tokens, start + batch.num_tokens, len(ids))
            hidden.append(self.model.forward(replace(batch, prefills=(chunk,)), cache))
        return torch.cat(hidden), cache

    def _replay(
        self, sequence: list[int], start: int, hidden: Tensor, cache: KvCache, depth: int
    ) -> tuple[int, list[int]]:
        """Walks the continuation as a speculating engine would: draft, keep the right prefix and one token more."""
        assert isinstance(self.model, HyV3)
        accepted = [0] * depth
        steps, known, drafted = 0, start + 1, 0
        while known + depth <= len(sequence):
            # Positions whose true next token became known since the last step.
            new = range(drafted, known - 1)
            out = self._draft(new.start, hidden[new.start : new.stop], sequence[new.start + 1 : known], cache)
            drafted = known - 1
            good = 0
            while int(token := self.model.logits(out[-1:]).argmax()) == sequence[known + good]:
                accepted[good] += 1
                good += 1
                if good == depth:
                    break
                out = self._draft(known - 2 + good, out[-1:], [int(token)], cache)
            steps += 1
            known += 1 + good
        return steps, accepted

    def _draft(self, position: int, hidden: Tensor, next_ids: Sequence[int], cache: KvCache) -> Tensor:
        assert isinstance(self.model, HyV3)
        batch = self._batch(next_ids, position, cache)
        return self.model.draft(batch, hidden, batch.token_ids, cache)


def _shared_tokens(sequences: Sequence[Sequence[int]]) -> int:
    """Tokens in whole pages that several sequences begin with, each with a token more."""
    if len(sequences) < 2:
        return 0
    ordered = sorted(list(ids) for ids in sequences)
    first, last = ordered[0], ordered[-1]  # what these two share all others share
    longest = min(map(len, sequences)) - 1
    same = next((at for at in range(longest) if first[at] != last[at]), longest)
    return same // PAGE_SIZE * PAGE_SIZE
