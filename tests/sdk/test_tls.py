"""TLS between client and server: a trusted chain, an untrusted one, and mutual authentication."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid.gateway.v1 import gateway_pb2_grpc as pb_grpc
from katydid_client import AsyncKatydid, Tls, UnavailableError
from katydid_runtime.server import RpcServer

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


class Gateway(pb_grpc.InferenceServiceServicer):
    async def ListModels(self, request, context):
        return pb.ListModelsResponse(models=[pb.Model(id="m")])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[bytes, bytes]:
    """Key and self-signed certificate of "localhost", as PEM."""
    folder: Path = tmp_path_factory.mktemp("tls")
    command = (
        *(
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "1",
        ),
        *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
        *("-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")),
    )
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return (folder / "key.pem").read_bytes(), (folder / "certificate.pem").read_bytes()


def models(certificate: tuple[bytes, bytes], tls: Tls | None, *, mutual: bool = False) -> list[str]:
    """Ask a TLS server for its models with a client that uses `tls`."""

    async def body() -> list[str]:
        roots = certificate[1] if mutual else None
        credentials = grpc.ssl_server_credentials([certificate], roots, require_client_auth=mutual)
        async with RpcServer("localhost:0", services=[], credentials=credentials) as server:
            pb_grpc.add_InferenceServiceServicer_to_server(Gateway(), server.grpc)
            address = await server.start()
            async with AsyncKatydid(address, tls=tls, max_retries=0, timeout=10) as client:
                return [model.id for model in await client.models()]

    return asyncio.run(body())


def test_a_trusted_server(certificate):
    assert models(certificate, Tls(certificate[1])) == ["m"]


@pytest.mark.parametrize("tls", [None, Tls()], ids=["plain text", "system roots"])
def test_an_untrusted_server_is_not_spoken_to(certificate, tls):
    with pytest.raises(UnavailableError):
        models(certificate, tls)


def test_mutual_authentication(certificate):
    key, chain = certificate
    assert models(certificate, Tls(chain, key, chain), mutual=True) == ["m"]
    with pytest.raises(UnavailableError):
        models(certificate, Tls(chain), mutual=True)
