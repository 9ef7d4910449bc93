"""Tokens: whose are taken, which are refused and that keys can be rotated."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from katydid_gateway.access import tokens
from katydid_gateway.access.scopes import ORDINARY, Identity, Scope
from katydid_gateway.access.tokens import TokenTerms, TokenVerifier
from katydid_runtime.errors import SettingsError, UnauthenticatedError

RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
OTHER = ec.generate_private_key(ec.SECP256R1())
NAMES = {"r": RSA, "e": EC, "o": OTHER}


def key_set(path: Path, *names: str) -> str:
    entries = []
    for name in names:
        algorithm = jwt.algorithms.RSAAlgorithm if name == "r" else jwt.algorithms.ECAlgorithm
        entries.append(json.loads(algorithm.to_jwk(NAMES[name].public_key())) | {"kid": name, "use": "sig"})
    entries.append({"kty": "oct", "kid": "s", "k": "c2VjcmV0"})
    path.write_text(json.dumps({"keys": entries}))
    return str(path)


def signed(name: str = "e", algorithm: str = "ES256", kid: str | None = None, **claims: Any) -> str:
    whole = {"iss": "https://id", "aud": "katydid", "sub": "team-a", "exp": time.time() + 60, **claims}
    given = {key: value for key, value in whole.items() if value is not None}
    return jwt.encode(given, NAMES[name], algorithm, {"kid": name if kid is None else kid})


def verifier(path: Path, *names: str, **terms: Any) -> TokenVerifier:
    made = TokenVerifier(TokenTerms(key_set(path, *names), "https://id", "katydid", **terms))
    asyncio.run(made.load())
    return made


def identity(made: TokenVerifier, token: str) -> Identity:
    return asyncio.run(made.identity(token))


def test_good_tokens(tmp_path: Path) -> None:
    made = verifier(tmp_path / "keys", "r", "e")
    assert identity(made, signed()) == Identity("team-a", ORDINARY)
    assert identity(made, signed("r", "RS256")) == Identity("team-a", ORDINARY)
    scoped = identity(made, signed(scope="openid katydid:inference katydid.metrics admin other:explain"))
    assert scoped.scopes == {Scope.INFERENCE, Scope.METRICS, Scope.ADMIN}
    assert identity(made, signed(scope=["tokenize"])).scopes == {Scope.TOKENIZE}
    assert identity(made, signed(scope="openid")).scopes == frozenset()
    assert identity(made, signed(exp=time.time() - 10)).tenant == "team-a", "within the skew"
    other = verifier(tmp_path / "more", "e", tenant_claim="org", scopes_claim="roles")
    assert identity(other, signed(org="o", roles=["metrics"])) == Identity("o", frozenset({Scope.METRICS}))
    one = verifier(tmp_path / "one", "e")
    assert identity(one, signed(kid="")).tenant == "team-a", "a provider of one key need not name it"


def test_refused_tokens(tmp_path: Path) -> None:
    made = verifier(tmp_path / "keys", "r", "e")
    public = base64.urlsafe_b64encode(b"secret").decode()
    head, body, _ = signed().split(".")
    forged = json.dumps({"alg": "none", "kid": "e"}).encode()
    refused = [
        "a.b.c",
        f"{base64.urlsafe_b64encode(forged).decode().rstrip('=')}.{body}.",
        f"{head}.{body}.{'A' * 86}",
        jwt.encode({"iss": "https://id", "aud": "katydid", "sub": "a", "exp": time.time() + 60}, public * 8, "HS256"),
        signed("r", "RS512"),
        signed("r", "RS256", kid="e"),
        signed("o"),
        signed("o", kid="e"),
        signed(iss="https://other"),
        signed(aud="other"),
        signed(aud=None),
        signed(exp=None),
        signed(exp=time.time() - 60),
        signed(nbf=time.time() + 60),
        signed(sub=None),
        signed(sub=""),
        signed(sub=7),
        signed(sub="x" * 300),
        signed(junk="x" * 20_000),
    ]
    for token in refused:
        with pytest.raises(UnauthenticatedError):
            identity(made, token)


def test_keys_are_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    made = verifier(path, "e")
    with pytest.raises(UnauthenticatedError, match="no key that is known"):
        identity(made, signed("o"))
    key_set(path, "o")
    with pytest.raises(UnauthenticatedError, match="no key that is known"):
        identity(made, signed("o"))
    monkeypatch.setattr(tokens, "_FETCH_PAUSE_S", 0.0)
    assert identity(made, signed("o")).tenant == "team-a"
    with pytest.raises(UnauthenticatedError, match="no key that is known"):
        identity(made, signed("e"))
    path.write_text("nonsense")
    assert identity(made, signed("o")).tenant == "team-a", "keys stay as they were"


@pytest.mark.parametrize(
    ("terms", "field"),
    [
        ({"algorithms": ("none",)}, "jwt_algorithms"),
        ({"algorithms": ("HS256",)}, "jwt_algorithms"),
        ({"keys": "http://id.example/keys"}, "jwt_keys"),
        ({"keys": "file:///etc/passwd"}, "jwt_keys"),
        ({"keys": "/none/such"}, "jwt_keys"),
    ],
)
def test_terms_that_are_not_safe_stop_the_start(terms: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError) as caught:
        asyncio.run(TokenVerifier(TokenTerms(**{"keys": "k", "issuer": "i", "audience": "a", **terms})).load())
    assert caught.value.field == field
