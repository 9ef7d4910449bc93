"""Settings of the gateway: names of engines, delays for tests, and values that stop the start."""

from __future__ import annotations

import pytest
from katydid_gateway.settings import EngineAddress, GatewaySettings
from katydid_runtime.errors import SettingsError

REQUIRED = ("--model", "folder", "--engines", "a=host:1,unix:/run/b")


def test_engines_have_names_and_delays_points() -> None:
    settings = GatewaySettings.load([*REQUIRED, "--fault-delays", "route:50, tokenise:2.5"])
    assert settings.engine_addresses() == (EngineAddress("a", "host:1"), EngineAddress("unix:/run/b", "unix:/run/b"))
    assert settings.fault_delays == {"route": 0.05, "tokenise": 0.0025}
    assert GatewaySettings.load(REQUIRED).fault_delays == {}


def test_the_secret_is_not_printed() -> None:
    settings = GatewaySettings.load([*REQUIRED, "--cache-salt-secret", "pepper"])
    assert "pepper" not in str(settings.describe())


@pytest.mark.parametrize(
    "options",
    [
        ("--engines", ","),
        ("--engines", "a=h:1,a=h:2"),
        ("--fault-delays", "nowhere:1"),
        ("--fault-delays", "route=1"),
        ("--tool-format", "json"),
        ("--max-requests", "0"),
        ("--client-buffer-bytes", "-1"),
        ("--request-timeout-s", "soon"),
        ("--unknown", "1"),
    ],
)
def test_bad_values_name_their_option(options: tuple[str, str]) -> None:
    with pytest.raises(SettingsError, match=options[0]):
        GatewaySettings.load([*REQUIRED, *options])
