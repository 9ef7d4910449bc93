"""API keys: who is known, and which lines of a file are none."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
from katydid_gateway.access.scopes import ORDINARY, Identity, Scope
from katydid_gateway.api_keys import ApiKeys, load_api_keys
from katydid_gateway.flow.budgets import TenantTerms
from katydid_runtime.errors import SettingsError


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def lines(*keys: tuple[str, bytes, str]) -> str:
    return "\n".join(f"{name}  {sha256(key).hexdigest().upper()} {rest} # {name}" for name, key, rest in keys)


def test_tenants_and_scopes_by_key(tmp_path: Path) -> None:
    text = lines(("a", b"k1", ""), ("b", b"k2", "scopes=metrics,admin weight=2"))
    keys = load_api_keys(written(tmp_path / "keys", f"# team keys\n\n{text}"))
    assert keys.known
    assert keys.identity("k1") == Identity("a", ORDINARY)
    assert keys.identity("k2") == Identity("b", frozenset({Scope.METRICS, Scope.ADMIN}))
    assert keys.terms("b") == TenantTerms(2.0)
    assert keys.identity("k3") is None
    assert keys.identity(sha256(b"k1").hexdigest()) is None


def test_without_a_file_there_are_no_keys() -> None:
    assert not load_api_keys(None).known
    assert ApiKeys().identity("whatever") is None


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
        f"a {'0' * 64} concurrency=0",
        f"a {'0' * 64} scopes=everything",
    ],
)
def test_files_that_hold_no_keys_stop_the_start(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError):
        load_api_keys(written(tmp_path / "keys", text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="missing"):
        load_api_keys(str(tmp_path / "missing"))


def test_terms_of_a_tenant(tmp_path: Path) -> None:
    line = f"a {'0' * 64} weight=2.5 tokens_per_minute=1000 concurrency=3 # the large one"
    keys = load_api_keys(written(tmp_path / "keys", line))
    assert keys.terms("a") == TenantTerms(2.5, 1000, 3)
    assert keys.terms("b") == ApiKeys().terms("a") == TenantTerms()
