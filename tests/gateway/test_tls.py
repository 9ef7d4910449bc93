"""The gateway behind TLS on both of its addresses, with engines that want its certificate."""

from __future__ import annotations

import asyncio
import ssl

import httpx
import pytest
from katydid_client import AsyncKatydid, Tls, UnavailableError

from tests.certificates import Certificate, make_certificate, needs_openssl
from tests.gateway.mock_options import MockOptions
from tests.gateway.rig import Rig, rig

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def context(certificate: Certificate, *, shows: bool) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=certificate.cert_file)
    if shows:
        made.load_cert_chain(certificate.cert_file, certificate.key_file)
    return made


async def chat(built: Rig, verify: ssl.SSLContext) -> httpx.Response:
    async with httpx.AsyncClient(verify=verify, timeout=10) as client:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        return await client.post(f"https://{built.gateway.http_address}/v1/chat/completions", json=body)


async def models(built: Rig, tls: Tls | None) -> list[str]:
    async with AsyncKatydid(built.gateway.grpc_address, tls=tls, max_retries=0, timeout=10) as client:
        return [model.id for model in await client.models()]


def test_https_and_grpc_to_clients_and_mutual_tls_to_engines(chatml, certificate):
    async def scenario() -> None:
        behind = MockOptions(tls=certificate.server(mutual=True))
        settings = certificate.settings() | {"tls_ca_file": certificate.cert_file}
        async with rig(chatml, options=behind, **settings) as built:
            answered = await chat(built, context(certificate, shows=False))
            assert answered.json()["usage"]["completion_tokens"] == 4
            assert await models(built, certificate.trusted) == ["mock"]
            with pytest.raises(UnavailableError):
                await models(built, None)
            with pytest.raises(httpx.TransportError):
                await built.http.get("/healthz")

    asyncio.run(scenario())


def test_clients_need_a_certificate_where_an_authority_is_set(chatml, certificate):
    async def scenario() -> None:
        async with rig(chatml, **certificate.settings(mutual=True)) as built:
            assert (await chat(built, context(certificate, shows=True))).status_code == 200
            assert await models(built, certificate.shown) == ["mock"]
            with pytest.raises(httpx.TransportError):
                await chat(built, context(certificate, shows=False))
            with pytest.raises(UnavailableError):
                await models(built, certificate.trusted)

    asyncio.run(scenario())


def test_a_renewed_certificate_is_taken_up_without_a_restart(chatml, tmp_path):
    async def scenario() -> None:
        old = make_certificate(tmp_path)
        async with rig(chatml, **old.settings()) as built:
            before = old.trusted, context(old, shows=False)
            assert await models(built, before[0]) == ["mock"]
            assert (await chat(built, before[1])).status_code == 200
            (tmp_path / "key.pem").write_text("half written")
            await asyncio.sleep(1.2)
            assert await models(built, before[0]) == ["mock"], "files that do not fit change nothing"
            make_certificate(tmp_path)
            deadline = asyncio.get_running_loop().time() + 30
            while True:
                try:
                    assert await models(built, old.trusted) == ["mock"]
                    assert (await chat(built, context(old, shows=False))).status_code == 200
                    break
                except (UnavailableError, httpx.TransportError):
                    assert asyncio.get_running_loop().time() < deadline
                    await asyncio.sleep(0.1)
            with pytest.raises(UnavailableError):
                await models(built, before[0])
            with pytest.raises(httpx.TransportError):
                await chat(built, before[1])

    asyncio.run(scenario())
