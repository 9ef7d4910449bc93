"""TLS between client and server: a trusted chain, an untrusted one, and mutual authentication."""

from __future__ import annotations

import asyncio

import pytest
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid.gateway.v1 import gateway_pb2_grpc as pb_grpc
from katydid_cache import CacheAdmin, CacheClient
from katydid_client import AsyncKatydid, Tls, UnavailableError
from katydid_runtime.server import RpcServer

from tests.certificates import Certificate, make_certificate, needs_openssl
from tests.kvcache.running import IDENTITY, LAYOUT, ServiceProcess, chain, make, run

pytestmark = needs_openssl


class Gateway(pb_grpc.InferenceServiceServicer):
    async def ListModels(self, request, context):
        return pb.ListModelsResponse(models=[pb.Model(id="m")])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def models(certificate: Certificate, tls: Tls | None, *, mutual: bool = False) -> list[str]:
    """Ask a TLS server for its models with a client that uses `tls`."""

    async def body() -> list[str]:
        async with RpcServer("localhost:0", services=[], tls=certificate.server(mutual=mutual)) as server:
            pb_grpc.add_InferenceServiceServicer_to_server(Gateway(), server.grpc)
            address = await server.start()
            async with AsyncKatydid(address, tls=tls, max_retries=0, timeout=10) as client:
                return [model.id for model in await client.models()]

    return asyncio.run(body())


def test_a_trusted_server(certificate):
    assert models(certificate, certificate.trusted) == ["m"]


@pytest.mark.parametrize("tls", [None, Tls()], ids=["plain text", "system roots"])
def test_an_untrusted_server_is_not_spoken_to(certificate, tls):
    with pytest.raises(UnavailableError):
        models(certificate, tls)


def test_mutual_authentication(certificate):
    assert models(certificate, certificate.shown, mutual=True) == ["m"]
    with pytest.raises(UnavailableError):
        models(certificate, certificate.trusted, mutual=True)


def test_the_cache_service_speaks_tls_to_clients_it_knows(certificate):
    blocks = make(3)

    async def scenario() -> None:
        with ServiceProcess(**certificate.settings(mutual=True)) as service:
            async with CacheClient(service.address, tls=certificate.shown) as cache:
                await cache.attach(IDENTITY, LAYOUT)
                await cache.put(blocks)
                assert (await cache.lookup(chain(blocks))).blocks == 3
            async with CacheAdmin(service.address, tls=certificate.shown) as admin:
                assert [space.blocks for space in await admin.namespaces()] == [3]
            for tls in (certificate.trusted, None):
                async with CacheClient(service.address, tls=tls, degrade=True) as stranger:
                    assert not await stranger.attach(IDENTITY, LAYOUT, timeout_s=1)

    run(scenario)
