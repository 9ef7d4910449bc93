"""`katydid eval`: one suite over one model in one or many engine configurations, as a table and as JSON."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from katydid_cli.evaluation.engine_process import running_engine
from katydid_cli.evaluation.engine_scorer import EngineScorer
from katydid_cli.evaluation.figures import Figure
from katydid_cli.evaluation.held_out import load_held_out
from katydid_cli.evaluation.report import Result, as_json, as_table
from katydid_cli.evaluation.report_page import PAGE, add_to_page
from katydid_cli.evaluation.scorer import EvaluationError, Scorer
from katydid_cli.evaluation.suite import EXTENTS, TASKS, check_tasks, needed, run_suite
from katydid_cli.evaluation.text import ModelText
from katydid_cli.writable import check_writable_file

__all__ = ["Configuration", "EvaluationOptions", "evaluate", "parse_configuration"]

_MODEL = "--model="


@dataclass(frozen=True)
class Configuration:
    """A name for the table, the engine options behind it, and the model where it is another (a quantised copy)."""

    name: str
    options: tuple[str, ...] = ()
    model: Path | None = None


@dataclass(frozen=True)
class EvaluationOptions:
    """What `katydid eval` was asked for."""

    model: Path
    data: Path
    configurations: tuple[Configuration, ...] = (Configuration("default"),)
    tasks: tuple[str, ...] = TASKS
    extent: str = "quick"
    in_process: bool = False
    output: Path | None = None
    report: bool = False


def parse_configuration(words: str) -> Configuration:
    """`NAME [--model=FOLDER] [ENGINE OPTIONS]`, such as "bf16 --dtype=bfloat16"; raises EvaluationError."""
    try:
        parts = shlex.split(words)
    except ValueError as error:
        raise EvaluationError(f"--configuration {words!r}: {error}", field="configuration", value=words) from error
    if not parts or parts[0].startswith("-"):
        raise EvaluationError(
            f"--configuration {words!r} has no name",
            field="configuration",
            value=words,
            allowed="NAME and then options of katydid serve-engine",
        )
    models = [Path(part.removeprefix(_MODEL)).expanduser() for part in parts if part.startswith(_MODEL)]
    options = tuple(part for part in parts[1:] if not part.startswith(_MODEL))
    return Configuration(parts[0], options, models[-1] if models else None)


def evaluate(options: EvaluationOptions, say: Callable[[str], None] = print) -> int:
    """Runs the suite over every configuration in turn; prints the table, writes the JSON, returns 0.

    Raises EvaluationError for a wrong task, extent, model folder or missing data, before any engine is started where
    that can be known; KatydidError of the engine where it refuses its options.
    """
    check_tasks(options.tasks)
    if options.extent not in EXTENTS:
        raise EvaluationError(f"extent is {options.extent!r}", field="extent", allowed=", ".join(sorted(EXTENTS)))
    names = [c.name for c in options.configurations]
    if len(set(names)) < len(names):
        raise EvaluationError(f"configurations {', '.join(names)} repeat a name", field="configuration")
    if options.output is not None:
        check_writable_file("--output", options.output)
    folders = sorted({options.model, *(c.model for c in options.configurations if c.model is not None)})
    for folder in folders:
        ModelText(folder)
    for kind in needed(options.tasks):
        load_held_out(options.data, kind)
    pages = [folder for folder in folders if (folder / PAGE).is_file()] if options.report else []
    if options.report and not pages:
        raise EvaluationError(f"--report: no model folder has a {PAGE}", field="report", allowed="folders of a recipe")
    results = []
    for configuration in options.configurations:
        say(f"== {configuration.name} {shlex.join(configuration.options)}".rstrip())
        results.append(Result(configuration.name, list(configuration.options), _measure(configuration, options, say)))
        if options.output is not None:  # after each one: a later configuration may fail
            options.output.write_text(as_json(str(options.model), results), encoding="utf-8")
    say(as_table(results))
    for folder in pages:
        add_to_page(folder, results)
    return 0


def _measure(configuration: Configuration, options: EvaluationOptions, say: Callable[[str], None]) -> list[Figure]:
    model = configuration.model or options.model

    def run(scorer: Scorer) -> list[Figure]:
        return run_suite(scorer, model, options.data, options.tasks, EXTENTS[options.extent], say)

    if options.in_process:
        return run(_in_process(model, configuration.options))
    with running_engine(model, configuration.options) as address, EngineScorer(address) as scorer:
        return run(scorer)


def _in_process(model: Path, words: Sequence[str]) -> Scorer:
    """The engine's model without its service. By name, because the command line does not depend on torch."""
    chosen = {"--device": "cpu", "--dtype": "auto", "--quantization": "auto", "--kv-cache-dtype": "auto"}
    for word in words:
        name, _, value = word.partition("=")
        if name not in chosen or not value:
            raise EvaluationError(
                f"--in-process knows no option {word!r}",
                field="configuration",
                value=word,
                allowed="--device=cpu|cuda, --dtype=auto|float32|bfloat16|float16, --quantization=auto|fp8|w4a8 and "
                "--kv-cache-dtype=auto|fp8",
            )
        chosen[name] = value
    scoring: Any = importlib.import_module("katydid_engine.scoring")
    scorer: Scorer = scoring.ModelScorer.open(model, *chosen.values())
    return scorer
