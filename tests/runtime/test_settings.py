"""Settings: precedence, one-line errors that name the culprit, no secret shown."""

from __future__ import annotations

import os

import pytest
from katydid_runtime.errors import SettingsError
from katydid_runtime.settings import CommaSeparated, ServiceSettings
from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import SettingsConfigDict


class SampleSettings(ServiceSettings):
    """Settings of a sample service."""

    model_config = SettingsConfigDict(env_prefix="KATYDID_SAMPLE_")

    engines: CommaSeparated = Field((), description="addresses")
    api_key: SecretStr | None = Field(None, description="key, 100 % secret")
    batch_tokens: int = Field(512, ge=1, description="tokens a step")
    fast: bool = Field(False, description="hurry")
    low: int = 0
    high: int = 10

    @model_validator(mode="after")
    def _ordered(self) -> SampleSettings:
        if self.low > self.high:
            raise ValueError("low must not exceed high")
        return self


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("KATYDID_"):
            monkeypatch.delenv(name)


def test_defaults():
    settings = SampleSettings.load()
    assert (settings.listen, settings.batch_tokens, settings.engines) == ("127.0.0.1:0", 512, ())


def test_the_command_line_beats_the_environment(monkeypatch):
    monkeypatch.setenv("KATYDID_SAMPLE_BATCH_TOKENS", "7")
    monkeypatch.setenv("KATYDID_SAMPLE_ENGINES", "a:1, b:2,")
    monkeypatch.setenv("KATYDID_SAMPLE_FAST", "true")
    monkeypatch.setenv("KATYDID_SAMPLE_LOW", "")
    settings = SampleSettings.load(["--batch-tokens", "9"])
    assert (settings.batch_tokens, settings.engines, settings.fast, settings.low) == (9, ("a:1", "b:2"), True, 0)
    assert not SampleSettings.load(["--no-fast"]).fast


def test_settings_are_frozen_and_closed():
    with pytest.raises(ValidationError):
        SampleSettings.load().batch_tokens = 3
    with pytest.raises(ValidationError):
        SampleSettings(batch_token=3)


@pytest.mark.parametrize(
    ("argv", "environment", "complaint"),
    [
        (["--batch-tokens", "0"], {}, r"^--batch-tokens=0: Input should be greater than or equal to 1$"),
        (
            [],
            {"KATYDID_SAMPLE_BATCH_TOKENS": "many"},
            r"^KATYDID_SAMPLE_BATCH_TOKENS=many: Input should be a valid int",
        ),
        ([], {"KATYDID_SAMPLE_BATCHTOKENS": "1"}, r"^environment variable KATYDID_SAMPLE_BATCHTOKENS names no setting"),
        (["--batch-token", "1"], {}, r"unrecognized arguments: --batch-token 1"),
        (["--batch-tokens"], {}, r"argument --batch-tokens: expected one argument"),
        (["--log-level", "loud"], {}, r"^--log-level=loud: Input should be 'debug', 'info', 'warning' or 'error'"),
        (["--low", "11"], {}, r"low must not exceed high"),
    ],
)
def test_bad_settings_name_the_culprit(monkeypatch, argv, environment, complaint):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=complaint) as caught:
        SampleSettings.load(argv)
    assert "\n" not in str(caught.value)


def test_a_missing_setting_is_named_both_ways():
    class Strict(ServiceSettings):
        model_config = SettingsConfigDict(env_prefix="KATYDID_STRICT_")
        model: str

    with pytest.raises(SettingsError, match=r"--model \(or KATYDID_STRICT_MODEL\) is required"):
        Strict.load()


def test_secrets_are_never_shown(monkeypatch):
    monkeypatch.setenv("KATYDID_SAMPLE_API_KEY", "sk-very-secret")
    assert "sk-very-secret" not in str(SampleSettings.load().describe())

    class Pin(ServiceSettings):
        model_config = SettingsConfigDict(env_prefix="KATYDID_PIN_")
        pin: SecretStr = Field(SecretStr("00000000"), min_length=8)

    with pytest.raises(SettingsError) as caught:
        Pin.load(["--pin", "1234"])
    assert "1234" not in str(caught.value)


def test_help_lists_option_variable_and_default(capsys):
    with pytest.raises(SystemExit) as caught:
        SampleSettings.load(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "--batch-tokens VALUE tokens a step (KATYDID_SAMPLE_BATCH_TOKENS; default 512)" in text
    assert "key, 100 % secret" in text
