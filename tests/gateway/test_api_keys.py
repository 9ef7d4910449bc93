"""API keys: who is known, and which lines of a file are none."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
from katydid_gateway.api_keys import ApiKeys, load_api_keys
from katydid_gateway.flow.budgets import TenantTerms
from katydid_runtime.errors import SettingsError, UnauthenticatedError


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_tenants_by_key(tmp_path: Path) -> None:
    lines = ["# team keys", "", *(f"{name}  {sha256(key).hexdigest().upper()} # {name}" for name, key in
                                  (("a", b"k1"), ("b", b"k2")))]  # fmt: skip
    keys = load_api_keys(written(tmp_path / "keys", "\n".join(lines)))
    assert keys.tenant("Bearer k1") == "a"
    assert keys.tenant("bearer k2 ") == "b"
    for wrong in ("", "Bearer", "Bearer ", "Bearer k3", "Basic k1", "k1", f"Bearer {sha256(b'k1').hexdigest()}"):
        with pytest.raises(UnauthenticatedError):
            keys.tenant(wrong)


def test_without_a_file_everyone_may_call() -> None:
    assert load_api_keys(None).tenant("") == ""
    assert ApiKeys().tenant("Bearer whatever") == ""


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a 12",
        "# nothing",
        f"a b {'0' * 64}",
        "",
        f"a {'g' * 64}",
        f"a {'0' * 64} weight=0",
        f"a {'0' * 64} tokens_per_minute=1.5",
        f"a {'0' * 64} colour=1",
    ],
)
def test_files_that_hold_no_keys_stop_the_start(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError):
        load_api_keys(written(tmp_path / "keys", text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="missing"):
        load_api_keys(str(tmp_path / "missing"))


def test_terms_of_a_tenant(tmp_path: Path) -> None:
    line = f"a {'0' * 64} weight=2.5 tokens_per_minute=1000 # the large one"
    keys = load_api_keys(written(tmp_path / "keys", line))
    assert keys.terms("a") == TenantTerms(2.5, 1000)
    assert keys.terms("b") == ApiKeys().terms("a") == TenantTerms()
