"""Rules of the house that no linter knows: file sizes, names, where the environment is read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("services", "kernels", "sdk", "cli", "scripts", "tools", "bench", "tests")
FORBIDDEN_NAMES = {"utils", "common", "helpers", "manager", "core"}


def sources() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def test_no_file_is_longer_than_400_lines() -> None:
    long = {str(path.relative_to(ROOT)): n for path in sources() if (n := len(path.read_text().splitlines())) > 400}
    assert not long


def test_no_module_hides_behind_a_name_without_meaning() -> None:
    named = [str(path.relative_to(ROOT)) for path in sources() if FORBIDDEN_NAMES & {path.stem, path.parent.name}]
    assert not named


def test_every_module_says_why_it_exists() -> None:
    texts = {path: path.read_text() for path in sources()}
    silent = [path for path, text in texts.items() if text.strip() and ast.get_docstring(ast.parse(text)) is None]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


def test_the_environment_is_read_by_settings_alone() -> None:
    # A child process's environment is written by the command line, which starts it; nothing else touches it.
    # The engine's settings take from the environment what torchrun says of the nodes; MKL hears of nothing else.
    allowed = {
        "services/runtime/katydid_runtime/settings.py",
        "services/engine/katydid_engine/settings.py",
        "kernels/katydid_kernels/linear.py",
    }
    readers = []
    for room in ("services", "sdk", "kernels"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name not in allowed and re.search(r"os\.environ|os\.getenv", path.read_text()):
                readers.append(name)
    assert not readers


@pytest.mark.parametrize("room", ["services", "kernels", "sdk", "cli"])
def test_no_leftover_marks(room: str) -> None:
    pattern = re.compile(r"#\s*(TODO|FIXME|XXX|HACK)\b")
    marked = [str(p.relative_to(ROOT)) for p in sorted((ROOT / room).rglob("*.py")) if pattern.search(p.read_text())]
    assert not marked
