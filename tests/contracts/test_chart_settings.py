"""The chart's environment variables are fields of the services' settings classes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from katydid_engine.settings import EngineSettings
from katydid_gateway.settings import GatewaySettings
from katydid_kvcache.settings import KvCacheSettings
from pydantic_settings import BaseSettings

TEMPLATES = Path(__file__).resolve().parents[2] / "helm" / "katydid" / "templates"
CLASSES: dict[str, type[BaseSettings]] = {
    "GATEWAY": GatewaySettings,
    "ENGINE": EngineSettings,
    "KVCACHE": KvCacheSettings,
}


@pytest.mark.parametrize("service", CLASSES)
def test_variables_are_settings(service: str) -> None:
    text = "".join(path.read_text() for path in TEMPLATES.glob("*.yaml"))
    used = {name.lower() for name in re.findall(rf"KATYDID_{service}_([A-Z0-9_]+)", text)}
    assert used
    assert used <= set(CLASSES[service].model_fields)
