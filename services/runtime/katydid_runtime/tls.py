"""TLS both ways: what a server shows and asks for, and what a client trusts and shows.

It is spoken on TCP alone: a Unix socket is plain text behind the permissions of its file. A server's files are read
again when they change, for the connections from then on; files that do not fit together are logged, and those before
stay in use. A client's are read at start.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import grpc

from katydid_runtime.errors import SettingsError

__all__ = ["CertificateWatch", "ServerTls", "Tls", "client_tls", "server_tls"]

_LOOK_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM bytes: roots to trust (the system's when None), and key and chain of the client for mutual TLS."""

    root_certificates: bytes | None = None
    private_key: bytes | None = None
    certificate_chain: bytes | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.root_certificates, self.private_key, self.certificate_chain)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of a server: its chain, its key, and the authority its clients must be certified by (None: anyone)."""

    cert_file: str
    key_file: str
    client_ca_file: str | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that follow the files. Raises SettingsError when one can't be read."""
        watch = CertificateWatch(self)

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            return self._configuration() if watch.changed() else None

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            fetch,  # type: ignore[arg-type]  # None says that nothing has changed
            require_client_authentication=self.client_ca_file is not None,
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = _read("tls_key_file", self.key_file), _read("tls_cert_file", self.cert_file)
        roots = None if self.client_ca_file is None else _read("tls_client_ca_file", self.client_ca_file)
        return grpc.ssl_server_certificate_configuration([pair], roots)


class CertificateWatch:
    """Tells when a server's files have become others that fit together; may be asked from any thread, at any rate."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._looked_at = time.monotonic()

    def changed(self) -> bool:
        """True once for every change. Looks once a second."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at < _LOOK_S:
                return False
            self._looked_at = now
            stamps = self._stamps()
            if stamps == self._seen:
                return False
            self._seen = stamps
        tls = self._tls
        try:
            server_tls(tls.cert_file, tls.key_file, tls.client_ca_file)
        except SettingsError as error:
            logger.error("certificates stay as they were: %s", error.message)
            return False
        logger.info("certificates were read again", extra={"tls_cert_file": tls.cert_file})
        return True

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        files = (self._tls.cert_file, self._tls.key_file, self._tls.client_ca_file)
        return tuple(None if path is None else _stamp(path) for path in files)


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def server_tls(cert_file: str | None, key_file: str | None, client_ca_file: str | None) -> ServerTls | None:
    """The settings of these names, checked; None without them: plain text.

    Raises SettingsError for one without the other, for a file that can't be read or holds no PEM of its kind, and for
    a key that is not the certificate's.
    """
    if cert_file is None and key_file is None:
        if client_ca_file is not None:
            raise SettingsError(
                "tls_client_ca_file is set without a certificate of the service's own",
                field="tls_client_ca_file",
                value=client_ca_file,
                allowed="together with tls_cert_file and tls_key_file",
            )
        return None
    if cert_file is None or key_file is None:
        missing = "tls_cert_file" if cert_file is None else "tls_key_file"
        raise SettingsError(
            f"{missing} is missing: tls_cert_file and tls_key_file belong together",
            field=missing,
            allowed="both or neither",
        )
    _read("tls_cert_file", cert_file)
    _read("tls_key_file", key_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password would be asked for at the terminal; an empty one fails at once.
        context.load_cert_chain(cert_file, key_file, password="")
    except ssl.SSLError as error:
        raise SettingsError(
            f"tls_cert_file={cert_file}, tls_key_file={key_file}: no certificate and its key ({error.reason or error})",
            field="tls_cert_file",
            value=cert_file,
            allowed="a PEM certificate chain and its unencrypted PEM key",
        ) from error
    if client_ca_file is not None:
        _authority("tls_client_ca_file", client_ca_file)
    return ServerTls(cert_file, key_file, client_ca_file)


def client_tls(ca_file: str | None, own: ServerTls | None) -> Tls | None:
    """How a service calls others: trusting `tls_ca_file`, showing its own certificate if it has one.

    None without `ca_file`: plain text. Raises SettingsError when a file can't be read or holds no certificate.
    """
    if ca_file is None:
        return None
    roots = _authority("tls_ca_file", ca_file)
    if own is None:
        return Tls(roots)
    return Tls(roots, _read("tls_key_file", own.key_file), _read("tls_cert_file", own.cert_file))


def _authority(setting: str, path: str) -> bytes:
    content = _read(setting, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise SettingsError(
            f"{setting}={path} holds no certificate", field=setting, value=path, allowed="PEM certificates"
        ) from error
    return content


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        message = f"{setting}={path} cannot be read: {error.strerror}"
        raise SettingsError(message, field=setting, value=path, allowed="a readable PEM file") from error
