"""Values that the operator's page gives to copy are values that the chart takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tools.chart.render import PRESETS, render
from tools.chart.validate import complaints

pytestmark = pytest.mark.chart

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
VALUES = [yaml.safe_load(block) for block in re.findall(r"```yaml\n# values\n(.*?)```", PAGE.read_text(), re.DOTALL)]


@pytest.mark.parametrize("values", VALUES, ids=range(len(VALUES)))
@pytest.mark.parametrize("preset", [*PRESETS, None])
def test_values_of_the_page_render(preset: str | None, values: dict[str, object]) -> None:
    assert complaints(render(preset, values)) == []


def test_the_page_shows_some_and_every_preset() -> None:
    assert VALUES
    assert all(f"presets/{preset}.yaml" in PAGE.read_text() for preset in PRESETS)
