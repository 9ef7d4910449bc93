"""Scores with the training form itself: no cache, no engine. The yardstick that engine configurations are held to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from katydid_cli.evaluation.scorer import Continuation, Scores
from torch import Tensor

from tools.hy3_tiny.export import load_checkpoint
from tools.hy3_tiny.model import Hy3Tiny, Shape


class LocalScorer:
    """hy3-tiny from a checkpoint folder, bf16 on a GPU and fp32 on a CPU."""

    def __init__(self, folder: Path, device: str) -> None:
        self.net = Hy3Tiny(Shape())
        load_checkpoint(self.net, folder)
        self.net.to(device).requires_grad_(False)
        self.device = device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.vocabulary, self.max_length, self.drafts = self.net.shape.vocab, 16384, True

    def _hidden(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        tokens = torch.tensor(ids, device=self.device)
        return tokens, self.net.trunk(tokens, len(ids), self.dtype)[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.net.head.to(hidden.dtype)).float()

    def score(self, ids: Sequence[int]) -> Scores:
        """Log probability and first-choice flag of ids[1:]."""
        tokens, hidden = self._hidden(ids)
        logits = self._logits(hidden[:-1])
        taken = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        return Scores(taken.tolist(), (logits.argmax(-1) == tokens[1:]).tolist())

    def score_many(self, sequences: Sequence[Sequence[int]]) -> list[Scores]:
        """One after another."""
        return [self.score(ids) for ids in sequences]

    def generate(
        self, ids: Sequence[int], max_tokens: int, stop: Sequence[int] = (), draft_depth: int = 0
    ) -> Continuation:
        """Greedy continuation by whole forwards; drafts are replayed afterwards, as an engine would have made them."""
        sequence = list(ids)
        while len(sequence) - len(ids) < max_tokens:
            _, hidden = self._hidden(sequence)
            token = int(self._logits(hidden[-1:]).argmax())
            if token in stop:
                break
            sequence.append(token)
        steps, accepted = self._replay(sequence, len(ids), draft_depth) if draft_depth else (0, [])
        return Continuation(sequence[len(ids) :], steps, accepted)

    def _replay(self, sequence: list[int], start: int, depth: int) -> tuple[int, list[int]]:
        """Walks the continuation step by step: draft `depth` tokens after the last known one, keep the right prefix."""
        tokens, hidden = self._hidden(sequence)
        accepted = [0] * depth
        steps, known = 0, start + 1
        while known + depth <= len(sequence):
            good = 0
            for draft in self._drafts(tokens[:known], hidden[: known - 1], depth):
                if draft != sequence[known + good]:
                    break
                accepted[good] += 1
                good += 1
            steps += 1
            known += 1 + good
        return steps, accepted

    def _drafts(self, known: Tensor, hidden: Tensor, depth: int) -> list[int]:
        """Greedy drafts after `known` [n] given the trunk's hidden of its first n - 1 positions."""
        drafts: list[int] = []
        for _ in range(depth):
            drafted, _ = self.net.draft(hidden, known[1:], hidden.shape[0], self.net.embed)
            token = self._logits(drafted[-1:]).argmax()
            drafts.append(int(token))
            known = torch.cat((known, token[None]))
            hidden = torch.cat((hidden, drafted[-1:]))
        return drafts
