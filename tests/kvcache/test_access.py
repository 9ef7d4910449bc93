"""Bearer tokens: every RPC has a scope, no token does more than its scopes, and the file never holds one."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
from katydid_kvcache.access import SCOPES, Access, load_access
from katydid_runtime.errors import PermissionDeniedError, SettingsError, UnauthenticatedError

CACHE, ADMIN = "/katydid.kvcache.v1.KvCacheService/", "/katydid.kvcache.v1.AdminService/"


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("x-request-id", "7"), ("authorization", f"Bearer {token}")]


@pytest.fixture
def access(tmp_path: Path) -> Access:
    file = tmp_path / "tokens"
    digests = {name: sha256(f"{name}-secret".encode()).hexdigest() for name in ("engine", "gateway", "operator")}
    file.write_text(
        f"engine read,write {digests['engine']}\n# watches alone\ngateway read {digests['gateway']}\n"
        f"operator admin {digests['operator']} # on call\n"
    )
    return load_access(str(file))


def test_every_rpc_needs_the_scope_of_what_it_does() -> None:
    assert {method for method, scope in SCOPES.items() if scope == "write"} == {
        CACHE + name for name in ("Put", "Reserve", "Commit", "Pull")
    }
    assert all((scope == "admin") == method.startswith(ADMIN) for method, scope in SCOPES.items())
    assert CACHE + "Attach" in SCOPES


@pytest.mark.parametrize(
    ("name", "may"), [("engine", {"read", "write"}), ("gateway", {"read"}), ("operator", {"admin"})]
)
def test_a_token_does_what_its_scopes_say_and_no_more(access: Access, name: str, may: set[str]) -> None:
    for method, scope in SCOPES.items():
        if scope in may:
            access.check(method, bearer(f"{name}-secret"))
        else:
            with pytest.raises(PermissionDeniedError, match=f"the token of {name} has no scope {scope}"):
                access.check(method, bearer(f"{name}-secret"))


@pytest.mark.parametrize("metadata", [[], [("authorization", "Basic engine-secret")], bearer("wrong"), bearer("")])
def test_nobody_gets_in_without_a_known_token(access: Access, metadata: list[tuple[str, str | bytes]]) -> None:
    with pytest.raises(UnauthenticatedError):
        access.check(CACHE + "Lookup", metadata)


def test_health_and_reflection_are_open_and_no_file_means_no_check(access: Access) -> None:
    access.check("/grpc.health.v1.Health/Check", [])
    load_access(None).check(CACHE + "Put", [])


@pytest.mark.parametrize("line", ["engine read", "engine read,delete " + "0" * 64, "engine read 12", "# nobody"])
def test_a_bad_file_is_refused_by_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(line + "\n")
    with pytest.raises(SettingsError) as caught:
        load_access(str(file))
    assert caught.value.field == "tokens_file"
