"""Runs the tasks over one scorer: which ones, how much of each, and the figures that come out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from katydid_cli.evaluation.acceptance import acceptance
from katydid_cli.evaluation.bits import bits_per_byte
from katydid_cli.evaluation.choice import multiple_choice
from katydid_cli.evaluation.figures import Figure
from katydid_cli.evaluation.held_out import Kind, load_held_out
from katydid_cli.evaluation.recall import LENGTHS, recall
from katydid_cli.evaluation.scorer import EvaluationError, Scorer
from katydid_cli.evaluation.text import ModelText
from katydid_cli.evaluation.tool_calls import tool_calls

TASKS = ("bits", "recall", "choice", "tools", "mtp")


@dataclass(frozen=True)
class Extent:
    """How much of each task is done: `quick` is for a look, `standard` for a table, `full` for a claim, `exhaustive` to
    tell apart what differs by half a per cent."""

    code_bytes: int
    text_bytes: int
    contexts: tuple[tuple[int, int], ...]  # (length, contexts)
    code_questions: int
    text_questions: int
    cases: int
    prompts: int


EXTENTS = {
    "quick": Extent(40_000, 20_000, ((1024, 8), (4096, 4)), 40, 20, 20, 8),
    "standard": Extent(400_000, 200_000, ((LENGTHS[0], 32), (LENGTHS[1], 32), (LENGTHS[2], 16)), 160, 80, 60, 24),
    "full": Extent(1_000_000, 450_000, ((LENGTHS[0], 64), (LENGTHS[1], 64), (LENGTHS[2], 48)), 400, 200, 200, 64),
    # Of text, all that can be asked: the held-out documents have 6,630 places.
    "exhaustive": Extent(
        1_000_000, 450_000, ((LENGTHS[0], 64), (LENGTHS[1], 768), (LENGTHS[2], 768)), 8000, 8000, 3000, 256
    ),
}


def check_tasks(tasks: Sequence[str]) -> None:
    """Raises EvaluationError for a task that does not exist."""
    for task in tasks:
        if task not in TASKS:
            raise EvaluationError(f"task is {task!r}, allowed are {', '.join(TASKS)}")


def needed(tasks: Sequence[str]) -> list[Kind]:
    """The kinds of held-out documents that `tasks` read."""
    kinds: list[Kind] = ["code"] if set(tasks) - {"tools"} else []
    return [*kinds, "text"] if set(tasks) & {"bits", "choice"} else kinds


def run_suite(
    scorer: Scorer, model: Path, data: Path, tasks: Sequence[str], extent: Extent, say: Callable[[str], None]
) -> list[Figure]:
    """All figures of `tasks`; raises MissingDataError and VocabularyMismatchError before any work is done."""
    check_tasks(tasks)
    text = ModelText(model)
    text.check(scorer)
    documents = {kind: load_held_out(data, kind) for kind in needed(tasks)}
    code, prose = documents.get("code", []), documents.get("text", [])
    figures: list[Figure] = []

    def add(work: Callable[[], list[Figure]]) -> None:
        started = time.monotonic()
        made = work()
        for f in made:
            say(f"{f.name} {f.value:.4f} [{f.low:.4f}, {f.high:.4f}] ({time.monotonic() - started:.1f} s)")
        figures.extend(made)

    if "bits" in tasks:
        add(lambda: [bits_per_byte(scorer, text, code, "code", extent.code_bytes)])
        add(lambda: [bits_per_byte(scorer, text, prose, "text", extent.text_bytes)])
    if "recall" in tasks:
        for length, contexts in extent.contexts:
            if length - 1 <= scorer.max_length:
                add(lambda length=length, contexts=contexts: [recall(scorer, text, code, length, contexts)])  # type: ignore[misc]
    if "choice" in tasks:
        add(lambda: [multiple_choice(scorer, text, code, "code", extent.code_questions)])
        add(lambda: [multiple_choice(scorer, text, prose, "text", extent.text_questions)])
    if "tools" in tasks:
        add(lambda: tool_calls(scorer, text, extent.cases))
    if "mtp" in tasks and scorer.drafts:
        add(lambda: acceptance(scorer, text, code, extent.prompts))
    return figures
