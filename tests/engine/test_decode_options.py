"""Which ranks plan a step while the one before runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from katydid_engine.decode_options import plans_ahead
from katydid_engine.parallel import ParallelPlan
from katydid_runtime.errors import SettingsError

from tests.engine.test_worker_group import CONFIG


@pytest.mark.parametrize(
    ("device", "plan", "asked", "ahead"),
    [
        ("cuda", "tp2", "auto", True),
        ("cuda", "tp2", "off", False),
        ("cpu", "tp2", "auto", False),
        ("cpu", "tp2", "on", True),
        ("cuda", "dp2,ep2", "auto", True),
        ("cpu", "dp2,ep2", "auto", False),
        ("cpu", "dp2,ep2", "on", True),
        ("cpu", "pp2", "auto", False),
        ("cuda", "pp2", "auto", False),
        ("cuda", "pp2", "on", None),
    ],
)
def test_who_plans_ahead(device: str, plan: str, asked: str, ahead: bool | None) -> None:
    config = replace(CONFIG, device=device, plan=ParallelPlan.parse(plan), async_scheduling=asked)
    if ahead is None:
        with pytest.raises(SettingsError, match="plan no step ahead"):
            plans_ahead(config)
    else:
        assert plans_ahead(config) is ahead
