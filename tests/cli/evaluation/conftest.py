"""hy3-tiny's text side, held-out documents that were made here, and a folder of them."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
from katydid_cli.evaluation.held_out import HeldOut
from katydid_cli.evaluation.text import ModelText

HY3_TINY = Path(__file__).parents[3] / "models" / "hy3-tiny"


@pytest.fixture(scope="session")
def text() -> ModelText:
    return ModelText(HY3_TINY)


@pytest.fixture(scope="session")
def documents() -> list[HeldOut]:
    body = "".join(
        f"def function_{i}(value, other):\n    result = value * {i} + other\n    return result - {i * 7}\n\n\n"
        for i in range(400)
    )
    return [HeldOut("made", f"{n}.py", f"# module {n}\n" + body[n * 60 :]) for n in range(4)]


@pytest.fixture
def data(tmp_path: Path, documents: list[HeldOut]) -> Path:
    folder = tmp_path / "data"
    (folder / "held_out").mkdir(parents=True)
    entries = [{"source": d.source, "path": d.path, "text": d.text} for d in documents]
    for kind in ("code", "text"):
        (folder / "held_out" / f"{kind}.xz").write_bytes(lzma.compress(json.dumps(entries).encode()))
    return folder
