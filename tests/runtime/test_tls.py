"""TLS settings: what a service refuses to start with, and where TLS is not spoken."""

from __future__ import annotations

import asyncio
import subprocess

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from katydid_runtime.channel import open_channel
from katydid_runtime.errors import SettingsError
from katydid_runtime.server import RpcServer
from katydid_runtime.settings import DialingSettings
from katydid_runtime.tls import ServerTls, Tls
from pydantic_settings import SettingsConfigDict

from tests.certificates import Certificate, make_certificate, needs_openssl

pytestmark = needs_openssl


class SampleSettings(DialingSettings):
    model_config = SettingsConfigDict(env_prefix="KATYDID_SAMPLE_")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_without_settings_there_is_no_tls():
    settings = SampleSettings()
    assert (settings.server_tls(), settings.client_tls()) == (None, None)


def test_settings_become_what_server_and_client_use(certificate):
    settings = SampleSettings(**certificate.settings(mutual=True), tls_ca_file=certificate.cert_file)
    assert settings.server_tls() == ServerTls(certificate.cert_file, certificate.key_file, certificate.cert_file)
    assert settings.client_tls() == certificate.shown
    assert SampleSettings(tls_ca_file=certificate.cert_file).client_tls() == certificate.trusted


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tls_cert_file": "cert"}, "tls_key_file"),
        ({"tls_key_file": "key"}, "tls_cert_file"),
        ({"tls_client_ca_file": "cert"}, "tls_client_ca_file"),
        ({"tls_cert_file": "missing", "tls_key_file": "key"}, "tls_cert_file"),
        ({"tls_cert_file": "cert", "tls_key_file": "missing"}, "tls_key_file"),
        ({"tls_cert_file": "cert", "tls_key_file": "cert"}, "tls_cert_file"),
        ({"tls_cert_file": "text", "tls_key_file": "key"}, "tls_cert_file"),
        ({"tls_cert_file": "cert", "tls_key_file": "stranger"}, "tls_cert_file"),
        ({"tls_cert_file": "cert", "tls_key_file": "locked"}, "tls_cert_file"),
        ({"tls_cert_file": "cert", "tls_key_file": "key", "tls_client_ca_file": "text"}, "tls_client_ca_file"),
        ({"tls_ca_file": "missing"}, "tls_ca_file"),
        ({"tls_ca_file": "text"}, "tls_ca_file"),
        ({"tls_ca_file": "key"}, "tls_ca_file"),
    ],
)
def test_what_cannot_work_is_said_at_start(given, field, certificate, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "text").write_text("no certificate\n")
    encrypt = ("openssl", "ec", "-in", certificate.key_file, "-aes128", "-passout", "pass:x")
    subprocess.run([*encrypt, "-out", str(tmp_path / "locked")], check=True, capture_output=True, timeout=60)
    files = {
        "cert": certificate.cert_file,
        "key": certificate.key_file,
        "stranger": make_certificate(tmp_path / "other").key_file,
    }
    settings = SampleSettings(**{name: files.get(path, str(tmp_path / path)) for name, path in given.items()})
    with pytest.raises(SettingsError, match=field) as raised:
        settings.client_tls()
    assert raised.value.field == field


def test_a_unix_socket_stays_plain(certificate, tmp_path):
    async def scenario(server_tls: ServerTls | None, tls: Tls | None) -> None:
        server = RpcServer(f"unix:{tmp_path}/socket", services=[], tls=server_tls)
        async with server, open_channel(await server.start(), tls) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            assert (await check(health_pb2.HealthCheckRequest(), timeout=5)).status

    asyncio.run(scenario(certificate.server(mutual=True), certificate.trusted))
    asyncio.run(scenario(None, certificate.trusted))
    asyncio.run(scenario(certificate.server(), None))
