"""What of a gateway is open, unauthenticated or unencrypted, and what closes it: said at start, and when asked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address

from katydid_gateway.settings import GatewaySettings

__all__ = ["Finding", "log_posture", "posture"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finding:
    """`open` says whether something is to be closed; `remedy` how."""

    subject: str
    open: bool
    state: str
    remedy: str = ""


def posture(settings: GatewaySettings) -> list[Finding]:
    """All findings, the open ones first. Reads settings alone."""
    found = [*_addresses(settings), *_callers(settings), *_callees(settings)]
    return sorted(found, key=lambda finding: not finding.open)


def log_posture(settings: GatewaySettings) -> None:
    """One line; a warning where something is open."""
    found = posture(settings)
    open_ones = [finding for finding in found if finding.open]
    logger.log(
        logging.WARNING if open_ones else logging.INFO,
        "posture: %d of %d points open",
        len(open_ones),
        len(found),
        extra={
            "open": [f"{finding.subject}: {finding.state}; {finding.remedy}" for finding in open_ones],
            "closed": [f"{finding.subject}: {finding.state}" for finding in found if not finding.open],
        },
    )


def _addresses(settings: GatewaySettings) -> Iterator[Finding]:
    encrypted = settings.tls_cert_file is not None
    for subject, address in (
        ("http", settings.http_listen),
        ("grpc", settings.listen),
        ("admin", settings.admin_listen),
    ):
        if address is None:
            yield Finding(subject, False, "off")
        elif _private(address):
            yield Finding(subject, False, f"on {address}, which this host alone reaches")
        elif encrypted:
            yield Finding(subject, False, f"TLS on {address}")
        else:
            yield Finding(subject, True, f"plain text on {address}", "set tls_cert_file and tls_key_file")
    if settings.probe_listen is not None:
        state = f"figures and health without TLS or keys on {settings.probe_listen}"
        closed = _private(settings.probe_listen)
        yield Finding("probes", not closed, state, "" if closed else "let the cluster's scrapers alone reach it")
    if encrypted:
        mutual = settings.tls_client_ca_file is not None
        state = "clients show certificates" if mutual else "clients need no certificate"
        yield Finding("mtls", False, state)


def _callers(settings: GatewaySettings) -> Iterator[Finding]:
    known = settings.api_keys_file is not None or settings.jwt_keys is not None
    mutual = settings.tls_client_ca_file is not None
    if known:
        yield Finding("callers", False, "need an API key or token")
    elif mutual:
        yield Finding("callers", False, "need a certificate; all are one tenant")
    else:
        private = _private(settings.http_listen) and _private(settings.listen)
        remedy = "" if private else "set api_keys_file or jwt_keys, or tls_client_ca_file"
        yield Finding("callers", not private, "anybody who reaches the gateway may use it", remedy)
    if settings.admin_listen is not None and not known:
        remedy = "set api_keys_file or jwt_keys, and give one key the scope admin"
        yield Finding("admin callers", True, f"anybody who reaches {settings.admin_listen} may change it", remedy)
    if not settings.metrics_need_scope and not _private(settings.http_listen):
        yield Finding("metrics", True, "anybody may read /metrics", "set metrics_need_scope, and scrape probe_listen")
    if known and settings.cache_salt_secret is None:
        yield Finding(
            "prefix caches", True, "tenants share them: time tells who asked what before", "set cache_salt_secret"
        )
    elif known:
        yield Finding("prefix caches", False, "each tenant has its own")
    yield Finding("prompts", False, "in no log and no trace")


def _callees(settings: GatewaySettings) -> Iterator[Finding]:
    called = [("engines", where.address) for where in settings.engine_addresses()]
    if settings.kvcache_address is not None:
        called.append(("cache service", settings.kvcache_address))
    for subject in dict.fromkeys(subject for subject, _ in called):
        far = [address for each, address in called if each == subject and not _private(address)]
        if not far:
            yield Finding(subject, False, "on this host")
        elif settings.tls_ca_file is not None:
            yield Finding(subject, False, "called over TLS")
        else:
            yield Finding(subject, True, f"prompts go to {', '.join(far)} in plain text", "set tls_ca_file")
    if settings.engine_networks:
        state = f"AdminService may add engines in {', '.join(settings.engine_networks)}"
        yield Finding("registration", False, state)


def _private(address: str) -> bool:
    """Whether this host alone reaches the address; a name other than localhost may be anybody's."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
