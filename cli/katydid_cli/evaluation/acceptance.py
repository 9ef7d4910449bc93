"""MTP acceptance: how many greedy draft tokens the model itself confirms while it continues held-out code."""

from __future__ import annotations

from collections.abc import Sequence

from katydid_cli.evaluation.figures import Figure, Item, estimate
from katydid_cli.evaluation.held_out import HeldOut
from katydid_cli.evaluation.scorer import EvaluationError, Generated, Scorer
from katydid_cli.evaluation.text import ModelText

DEPTH = 3
PROMPT = 256  # tokens
CONTINUATION = 96  # tokens


def acceptance(scorer: Scorer, text: ModelText, documents: Sequence[HeldOut], prompts: int) -> list[Figure]:
    """`mtp.depth<d>.acceptance` for d = 1..3 and `mtp.tokens_per_step`.

    Acceptance at d is the share of steps whose first d drafts were all right.

    Raises EvaluationError when no document is long enough for a prompt.
    """
    runs: list[Generated] = []
    for document in documents:
        ids = text.encode(document.text)
        if len(ids) >= PROMPT and len(runs) < prompts:
            runs.append(scorer.generate([text.bos, *ids[:PROMPT]], CONTINUATION, (text.eos,), DEPTH))
    if not any(run.steps for run in runs):
        raise EvaluationError(f"mtp: no held-out document gave a continuation of a prompt of {PROMPT} tokens")
    figures = [
        estimate(
            f"mtp.depth{d + 1}.acceptance",
            [Item(r.accepted[d] if r.steps else 0, r.steps) for r in runs],
            "share",
            "higher",
        )
        for d in range(DEPTH)
    ]
    gains = [Item(r.steps + sum(r.accepted), r.steps) for r in runs]
    return [*figures, estimate("mtp.tokens_per_step", gains, "token/step", "higher")]
