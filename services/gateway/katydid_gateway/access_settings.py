"""What a gateway can be told about who may call it, how many of it there are, and who may change it while it runs."""

from __future__ import annotations

from ipaddress import ip_network

from katydid_runtime.errors import SettingsError
from katydid_runtime.settings import CommaSeparated, DialingSettings
from pydantic import Field, field_validator

from katydid_gateway.access.tokens import TokenTerms

__all__ = ["AccessSettings"]


class AccessSettings(DialingSettings):
    """Part of GatewaySettings."""

    api_keys_file: str | None = Field(
        None,
        description="file of API keys, read again when it changes, a line each: NAME SHA256-OF-KEY-IN-HEX "
        "[weight=N] [tokens_per_minute=N] [concurrency=N] [scopes=inference,tokenize,explain,metrics,admin]",
    )
    jwt_keys: str | None = Field(None, description="JSON Web Key Set that tokens are checked with: a path or https URL")
    jwt_issuer: str | None = Field(None, description="issuer that tokens must name (with jwt_keys)")
    jwt_audience: str | None = Field(None, description="audience that tokens must name (with jwt_keys)")
    jwt_algorithms: CommaSeparated = Field(
        ("RS256", "ES256", "EdDSA"), description="algorithms of tokens that are taken, comma separated"
    )
    jwt_tenant_claim: str = Field("sub", description="claim that names a token's tenant")
    jwt_scopes_claim: str = Field(
        "scope",
        description="claim that lists scopes, as katydid:inference or inference; absent: the ordinary",
    )
    jwt_clock_skew_s: float = Field(30.0, ge=0, le=600, description="how far an issuer's clock may be off")
    max_requests_per_tenant: int = Field(
        0, ge=0, description="most requests of one tenant in flight, where its key names no concurrency; 0: any number"
    )
    metrics_need_scope: bool = Field(
        False, description="ask for a key or token with the scope metrics at /metrics of http_listen"
    )
    processes: int = Field(
        1, ge=1, le=64, description="gateway processes on the same ports, kept alive by a parent; limits are divided"
    )
    process_pipe: int | None = Field(
        None, ge=0, description="set by the parent of several processes: where this one shows that it lives"
    )
    replicas: int = Field(
        1, ge=1, description="gateways that serve the same tenants; each grants its part of their budgets"
    )
    admin_listen: str | None = Field(
        None, description="gRPC address of AdminService, best a loopback or private one; unset: there is none"
    )
    engine_networks: CommaSeparated = Field(
        (), description="networks, as 10.0.0.0/8, in which AdminService may add engines; none: it may not"
    )
    engine_ports: str = Field("1024-65535", description="ports on which AdminService may add engines, FIRST-LAST")

    @field_validator("engine_networks")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            ip_network(network)
        return value

    @field_validator("engine_ports")
    @classmethod
    def _ports(cls, value: str) -> str:
        first, separator, last = value.partition("-")
        if not (separator and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= 65535):
            raise ValueError("it must be FIRST-LAST, within 1-65535")
        return value

    def check(self) -> None:
        """Raises SettingsError for what does not go together."""
        if self.admin_listen is None:
            return
        host = self.admin_listen.rpartition(":")[0].strip("[]")
        local = self.admin_listen.startswith("unix:") or host in ("127.0.0.1", "::1", "localhost")
        if not (local or self.api_keys_file or self.jwt_keys or self.tls_client_ca_file):
            raise SettingsError(
                f"anybody who reaches {self.admin_listen} could change the gateway",
                field="admin_listen",
                value=self.admin_listen,
                allowed="a loopback address, or one with api_keys_file, jwt_keys or tls_client_ca_file",
            )

    def token_terms(self) -> TokenTerms | None:
        """How tokens are checked; None: no tokens are taken. Raises SettingsError."""
        if self.jwt_keys is None:
            for name in ("jwt_issuer", "jwt_audience"):
                if getattr(self, name) is not None:
                    raise SettingsError(f"{name} is set without jwt_keys", field=name, allowed="together with jwt_keys")
            return None
        if not self.jwt_issuer or not self.jwt_audience:
            missing = "jwt_audience" if self.jwt_issuer else "jwt_issuer"
            raise SettingsError(
                f"{missing} is missing: tokens of anybody's would be taken", field=missing, allowed="a name"
            )
        terms = TokenTerms(
            self.jwt_keys,
            self.jwt_issuer,
            self.jwt_audience,
            self.jwt_algorithms,
            self.jwt_tenant_claim,
            self.jwt_scopes_claim,
            self.jwt_clock_skew_s,
        )
        terms.check()
        return terms

    @property
    def shares(self) -> int:
        """Processes among which what a tenant was given is divided."""
        return self.processes * self.replicas
