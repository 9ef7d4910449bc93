"""The evaluation's table, JSON and refusals, with figures that were made here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from katydid_cli.evaluation import command
from katydid_cli.evaluation.command import Configuration, EvaluationOptions, evaluate, parse_configuration
from katydid_cli.evaluation.figures import Figure
from katydid_cli.evaluation.report import Result, as_json, as_table
from katydid_cli.evaluation.report_page import PAGE
from katydid_cli.evaluation.scorer import Continuation, EvaluationError, VocabularyMismatchError
from katydid_cli.evaluation.text import ModelText

from tests.cli.evaluation.conftest import HY3_TINY
from tests.cli.evaluation.paper_scorer import PaperScorer


def figure(name: str, value: float, samples: tuple[tuple[float, float], ...] = ()) -> Figure:
    return Figure(name, value, value - 0.02, value + 0.02, "share", 50, "higher", samples)


def test_the_table_says_what_is_lost_on_the_same_items() -> None:
    first, second = (
        Result(name, [], [figure("recall.4k.accuracy", value, ((20 * value, 20),) * 4)])
        for name, value in (("bf16", 0.8), ("w4a8", 0.7))
    )
    table = as_table([first, second])
    assert "| 0.8000 ±0.0200 | 0.7000 (+12.50 % [+12.50, +12.50]) |" in table
    assert table.endswith("\nIn brackets: % lost against bf16, with its 95 % interval; a minus is a gain.\n")
    again = Result("again", [], [figure("recall.4k.accuracy", 0.8, first.figures[0].samples)])
    assert "(+0.00 % [+0.00, +0.00])" in as_table([first, again])


def test_the_table_puts_configurations_side_by_side() -> None:
    first = Result("bf16", [], [figure("recall.4k.accuracy", 0.95), figure("choice.code.accuracy", 0.7)])
    second = Result("w4a8", ["--weights=w4a8"], [figure("recall.4k.accuracy", 0.9)])
    table = as_table([first, second])
    assert "| recall.4k.accuracy   | share | 0.9500 ±0.0200 | 0.9000 ±0.0200 |" in table
    assert "| choice.code.accuracy | share | 0.7000 ±0.0200 | -              |" in table
    body = json.loads(as_json("m", [first, second]))
    assert body["format"] == "katydid.eval/1"
    assert body["results"][1]["options"] == ["--weights=w4a8"]
    assert body["results"][0]["figures"][0]["low"] == pytest.approx(0.93)


def test_a_configuration_is_a_name_and_engine_options() -> None:
    assert parse_configuration("w4a8 --model=/models/copy --tp 2") == Configuration(
        "w4a8", ("--tp", "2"), Path("/models/copy")
    )
    assert parse_configuration("bf16 --dtype=bfloat16 --plan tp2") == Configuration(
        "bf16", ("--dtype=bfloat16", "--plan", "tp2")
    )
    for words in ("", "--dtype=bfloat16", 'a "b'):
        with pytest.raises(EvaluationError, match="configuration"):
            parse_configuration(words)


def test_evaluate_writes_the_table_and_the_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: Path) -> None:
    scorer = PaperScorer(continuation=lambda ids: Continuation([7] * 4, 2, [2, 1, 0]))
    monkeypatch.setattr(command, "_in_process", lambda model, options: scorer)
    said: list[str] = []
    options = EvaluationOptions(HY3_TINY, data, in_process=True, output=tmp_path / "out.json")
    assert evaluate(options, said.append) == 0
    names = [f["name"] for f in json.loads((tmp_path / "out.json").read_text())["results"][0]["figures"]]
    assert names == [
        *("code.bits_per_byte", "text.bits_per_byte", "recall.1k.accuracy", "recall.4k.accuracy"),
        *("choice.code.accuracy", "choice.text.accuracy", "tools.valid_rate", "tools.exact_rate"),
        *("mtp.depth1.acceptance", "mtp.depth2.acceptance", "mtp.depth3.acceptance", "mtp.tokens_per_step"),
    ]
    assert "| mtp.depth1.acceptance" in said[-1]


def test_the_table_goes_into_the_page_of_a_quantised_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: Path
) -> None:
    monkeypatch.setattr(command, "_in_process", lambda model, options: PaperScorer())
    copy = tmp_path / "copy"
    shutil.copytree(HY3_TINY, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    options = EvaluationOptions(
        HY3_TINY,
        data,
        (Configuration("bf16"), Configuration("<w4a8>", (), copy)),
        ("bits",),
        in_process=True,
        report=True,
    )
    with pytest.raises(EvaluationError, match="no model folder has a quantization-report"):
        evaluate(options)
    (copy / PAGE).write_text("<h1>Quantisation report</h1>\n")
    for _ in range(2):
        evaluate(options, lambda _: None)
    page = (copy / PAGE).read_text()
    assert page.startswith("<h1>Quantisation report</h1>")
    assert page.count('<section id="evaluation">') == page.count("<td>code.bits_per_byte</td>") == 1
    assert "<th>&lt;w4a8&gt;</th>" in page


def test_wrong_questions_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    for options, message in [
        (EvaluationOptions(HY3_TINY, tmp_path, tasks=("bits", "poetry")), "task is 'poetry', allowed are bits, recall"),
        (EvaluationOptions(HY3_TINY, tmp_path, extent="huge"), "extent is 'huge'"),
        (EvaluationOptions(HY3_TINY, tmp_path), "held-out code is not at"),
        (EvaluationOptions(tmp_path, tmp_path), "cannot be read|is not a model folder"),
        (EvaluationOptions(HY3_TINY, tmp_path, (Configuration("a"), Configuration("a"))), "repeat a name"),
        (
            EvaluationOptions(HY3_TINY, tmp_path, (Configuration("a", ("--tp=2",)),), ("tools",), in_process=True),
            "--in-process knows no option '--tp=2'",
        ),
    ]:
        with pytest.raises(EvaluationError, match=message):
            evaluate(options)


def test_a_model_with_another_vocabulary_is_refused(text: ModelText) -> None:
    with pytest.raises(
        VocabularyMismatchError, match="the model has 272 token ids, the tokenizer of the evaluation 4096"
    ):
        text.check(PaperScorer(vocabulary=272))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"has no tokenizer_config.json|cannot be read"):
        ModelText(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EvaluationError, match="cannot be read"):
        ModelText(tmp_path)
