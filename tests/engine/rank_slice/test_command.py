"""What `katydid bench slice` and `katydid bench workload` say, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from katydid_engine.model_config import read_model_config
from katydid_engine.rank_slice.__main__ import main
from katydid_engine.rank_slice.lengths import parse_lengths
from katydid_runtime.errors import SettingsError

from tests.tiny_model import write_tiny_model

MODEL = str(Path(__file__).parents[3] / "models" / "hy3-tiny")
BUILD = ["--model", MODEL, "--plan", "tp2", "--device", "cpu"]


def test_slice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "slice.json"
    words = [
        "--prefill",
        "128",
        "--chunk",
        "64",
        "--batch",
        "1,2",
        "--context",
        "64",
        "--repeats",
        "2",
        "--drafts",
        "0,1",
    ]
    assert main(["slice", *BUILD, *words, "--routing", "skewed", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert [row["figure"].split(": ")[1] for row in record["rows"]] == [
        "prefill of 128 tokens in chunks of 64, and by a draft layer",
        "decode of 1 at 64",
        "decode of 2 at 64",
        "decode of 1 at 64, 1 drafts",
        "decode of 2 at 64, 1 drafts",
    ]
    assert record["routing"] == "skewed"
    assert all(row["value"] > row["floor"] > 0 for row in record["rows"])
    assert "not in it: tp all_reduce, 14 calls" in capsys.readouterr().out


def test_loops_and_last_positions(tmp_path: Path) -> None:
    model, path = write_tiny_model(tmp_path / "model", "hy_v3"), tmp_path / "slice.json"
    nothing = ["--prefill", "", "--batch", "", "--repeats", "1"]
    words = ["--loop", "2", "--last-chunk", "32", "--json", str(path)]
    assert main(["slice", "--model", str(model), "--plan", "tp2", "--device", "cpu", *nothing, *words]) == 0
    figures = [row["figure"].split(": ")[1] for row in json.loads(path.read_text())["rows"]]
    last = read_model_config(model).max_positions
    assert figures == [
        f"last 32 tokens of a prompt of {last - 32}",
        f"last 32 tokens of a prompt of {last - 32}, sparse",
        f"last 32 tokens of a prompt of {last // 16 - 32}",
        "scheduler's loop, batch 2, synchronous",
        "scheduler's loop, batch 2, a step ahead",
    ]


def test_workload_by_step_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = tmp_path / "times.json"
    decodes = [[n, context, 0.003 + 1e-8 * n * context] for n in (1, 64) for context in (1024, 4096)]
    chunks = [[n, context, 0.02 + 1e-5 * n + 1e-12 * n * context] for n in (64, 8192) for context in (0, 65536)]
    times.write_text(json.dumps({"step_times": {"decodes": decodes, "chunks": chunks}}))
    path = tmp_path / "workload.json"
    words = ["--step-times", str(times), "--rates", "0.3", "--minutes", "3", "--link-model", "--json", str(path)]
    assert main(["workload", "--plan", "tp8", *words]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["figure"].startswith("simulated, 0.3 requests a second offered, with the link model")
    assert 0.7 < row["value"] <= 1
    assert row["cached_share"] > 0.5
    assert "of requests" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["slice", *BUILD, "--prefill", "3x"], "prefill: '3x', expected numbers above zero"),
        (["slice", *BUILD, "--batch", "1,2", "--context", "1,2,3"], "context '1,2,3': expected one length, or one for"),
        (["slice", *BUILD, "--prefill", "1M"], "1048576 tokens: the model has 16384 positions"),
        (["slice", *BUILD, "--rank", "2"], "rank=2, expected 0 to 1"),
        (["slice", *BUILD, "--drafts", "1,9"], "drafts '1,9': expected 0 to 3, or several of them"),
        (["slice", *BUILD, "--prefill", "", "--sparse-budget", "2"], "budget is 2.0"),
        (["slice", *BUILD, "--prefill", "", "--last-chunk", "9K"], "last_chunk 9216: the model has 16384 positions"),
        (["slice", "--plan", "tp2x"], "parallel plan 'tp2x'"),
        (["workload", "--step-times", "/no/such/file"], "step_times: /no/such/file cannot be read"),
        (["workload", "--step-times", MODEL + "/config.json", "--rates", "0"], "step_times"),
    ],
)
def test_what_is_asked_wrongly(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_lengths() -> None:
    assert parse_lengths("prefill", "8K, 1M,7") == [8192, 1 << 20, 7]
    assert parse_lengths("prefill", " ") == []
    with pytest.raises(SettingsError, match="batch: '0'"):
        parse_lengths("batch", "1,0")


def test_a_large_model_is_not_begun_on_a_machine_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("slice", "workload"):
        assert main([command, "--plan", "tp8"]) == 2
        assert "torch sees no GPU, and hy3 is made for one" in capsys.readouterr().err
