"""Certificates for tests of TLS, made with the openssl command: each of "localhost", and its own authority."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from katydid_runtime.tls import ServerTls, Tls

__all__ = ["Certificate", "make_certificate", "needs_openssl"]

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


@dataclass(frozen=True)
class Certificate:
    cert_file: str
    key_file: str

    @property
    def trusted(self) -> Tls:
        """A client that trusts this certificate and shows none."""
        return Tls(Path(self.cert_file).read_bytes())

    @property
    def shown(self) -> Tls:
        """A client that trusts this certificate and shows it."""
        chain = Path(self.cert_file).read_bytes()
        return Tls(chain, Path(self.key_file).read_bytes(), chain)

    def server(self, *, mutual: bool = False) -> ServerTls:
        return ServerTls(self.cert_file, self.key_file, self.cert_file if mutual else None)

    def settings(self, *, mutual: bool = False) -> dict[str, str]:
        """The settings of a service that shows this certificate."""
        pair = {"tls_cert_file": self.cert_file, "tls_key_file": self.key_file}
        return pair | {"tls_client_ca_file": self.cert_file} if mutual else pair


def make_certificate(folder: Path) -> Certificate:
    made = Certificate(str(folder / "certificate.pem"), str(folder / "key.pem"))
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", made.key_file)
    name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    command = ("openssl", "req", "-x509", "-days", "1", *key, *name, "-out", made.cert_file)
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return made
