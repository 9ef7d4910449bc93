"""What `katydid plan` reads from its options, and that its record and its table agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from katydid_cli.plan import PlanOptions, parse_slo, parse_tokens, plan
from katydid_runtime.errors import SettingsError


def test_tokens_and_targets() -> None:
    assert [parse_tokens(text) for text in ("32768", "256K", "1M")] == [32768, 262144, 1 << 20]
    assert parse_slo("ttft=4,tpot=0.05") == parse_slo("tpot=0.05, ttft=4") == (4.0, 0.05)
    for text in ("", "0", "12k", "-3"):
        with pytest.raises(SettingsError, match="expected tokens like"):
            parse_tokens(text)
    for text in ("", "ttft=4", "ttft=0,tpot=1", "ttft=4;tpot=1"):
        with pytest.raises(SettingsError, match="expected seconds like"):
            parse_slo(text)


def test_a_record_and_a_table_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text("gpus: {min: 8, max: 8}\n")
    plan(PlanOptions("hy3", pool, "32K", "ttft=4,tpot=0.05", "96GB", as_json=True))
    record = json.loads(capsys.readouterr().out)
    assert next(one["plan"] for one in record["candidates"]) == "tp8"
    assert record["choice"]["decode"]["role"] == "decode"
    plan(PlanOptions("hy3", pool, "32K", "ttft=4,tpot=0.05", "96GB", as_json=False))
    printed = capsys.readouterr().out
    assert record["choice"]["prefill"]["plan"] in printed
    assert all(reason in printed for reason in record["why"])
    with pytest.raises(SettingsError, match="memory_cap='96'"):
        plan(PlanOptions("hy3", None, "32K", "ttft=4,tpot=0.05", "96", as_json=False))


def test_the_embedded_model_is_planned_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    plan(PlanOptions("hy3-tiny", None, "1K", "ttft=4,tpot=0.05", None, as_json=False))
    assert "one plan for both" in capsys.readouterr().out
