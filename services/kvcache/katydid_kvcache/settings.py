"""Everything the KV-cache service can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from katydid_runtime.errors import SettingsError
from katydid_runtime.fault_delays import delays_at
from katydid_runtime.settings import DialingSettings
from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from katydid_kvcache.policy.policy_file import CachePolicy, read_policy

__all__ = ["KvCacheSettings"]

_MIB = 1024 * 1024


class KvCacheSettings(DialingSettings):
    """KV-cache service: keeps KV blocks in host memory and on disk."""

    model_config = SettingsConfigDict(env_prefix="KATYDID_KVCACHE_")

    admin_listen: str | None = Field(None, description="gRPC address of AdminService alone; unset: beside the cache's")
    tokens_file: str | None = Field(
        None, description="file of bearer tokens, a line each: NAME SCOPES SHA256-OF-TOKEN-IN-HEX; unset: no check"
    )
    peer_listen: str | None = Field(
        None, description="second gRPC address, for other instances and other hosts, when listen is a Unix socket"
    )
    peer_address: str | None = Field(
        None, description="host:port by which other hosts know this instance; unset: peer_listen, or listen"
    )
    lane_listen: str | None = Field(
        None, description="TCP address of bulk lanes, host:port; unset, or with TLS: streams alone"
    )
    lanes: int = Field(4, ge=1, le=64, description="bulk lanes of pulls at a time, each in a process of its own")
    pull_from: str | None = Field(
        None, description="instances to pull blocks from: HOST:PORT,..., dns:NAME:PORT or file:PATH; unset: none"
    )
    memory_bytes: int = Field(1024 * _MIB, ge=_MIB, description="host memory for blocks")
    slab_bytes: int = Field(
        64 * _MIB,
        ge=64 * 1024,
        description="unit in which memory and disk are given to block sizes; no block is larger",
    )
    disk_path: str | None = Field(None, description="folder of the disk tier, made if missing; unset: no disk tier")
    disk_bytes: int = Field(8 * 1024 * _MIB, ge=0, description="disk space for blocks; 0: no disk tier")
    disk_direct_io: bool = Field(True, description="bypass the page cache where the filesystem can")
    disk_threads: int = Field(4, ge=1, le=64, description="threads that read and write disk slots")
    disk_queue_bytes: int = Field(
        256 * _MIB, ge=_MIB, description="bytes on their way to disk; beyond, writes that may be lost are shed"
    )
    disk_sync: bool = Field(True, description="flush the device before a write counts as durable (power loss)")
    index_map_bytes: int = Field(4 * 1024 * _MIB, ge=16 * _MIB, description="most the disk index may grow to (sparse)")
    lease_ttl_s: float = Field(60.0, gt=0, le=3600, description="longest and default time to live of a lease")
    block_ttl_s: float = Field(0.0, ge=0, description="time to live of blocks written without one; 0: for ever")
    shared_url: SecretStr | None = Field(
        None,
        description="shared store: s3://BUCKET/PREFIX (also gs, az, file) or redis://HOST:PORT/DB; unset: none",
    )
    shared_pack_bytes: int = Field(
        32 * _MIB, ge=_MIB, le=256 * _MIB, description="payload bytes gathered into one object of the shared store"
    )
    shared_queue_bytes: int = Field(
        256 * _MIB, ge=_MIB, description="bytes on their way to the shared store; beyond, blocks are shed"
    )
    shared_timeout_s: float = Field(
        5.0, gt=0, le=300, description="longest wait for one call to the shared store; then its blocks are misses"
    )
    shared_refresh_s: float = Field(
        2.0, gt=0, le=3600, description="time between looks for what other instances put into the shared store"
    )
    shared_index_blocks: int = Field(
        1_000_000, ge=1, description="blocks of the shared store known at a time, at about 600 bytes each"
    )
    policy_file: str | None = Field(
        None, description="YAML file of tiers, times, sharing and quotas (docs/kvcache-policy.md); unset: defaults"
    )
    prefill_tokens_per_s: float = Field(
        10_000.0, gt=0, description="prefill speed of the engines, for figures of the time that hits saved"
    )
    stream_window_bytes: int = Field(
        16 * _MIB, ge=_MIB, description="payload bytes a Put stream may have on the way before they are stored"
    )
    stream_stall_timeout_s: float = Field(30.0, gt=0, description="a stream whose client does nothing so long is ended")
    scrub_bytes_per_s: int = Field(
        16 * _MIB, ge=0, description="how fast blocks nobody asks for are read again to find wrong bytes; 0: never"
    )
    fault_delays: Annotated[dict[str, float], NoDecode, BeforeValidator(delays_at("lookup", "get"))] = Field(
        {}, description="for tests: delays, point:milliseconds,... at lookup, get"
    )

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.slab_bytes % 4096:
            raise ValueError(f"slab_bytes is {self.slab_bytes}; it must be a multiple of 4096")
        if self.memory_bytes < self.slab_bytes:
            raise ValueError(f"memory_bytes is {self.memory_bytes}; it must hold a slab of {self.slab_bytes} bytes")
        if self.disk_path and 0 < self.disk_bytes < self.slab_bytes:
            raise ValueError(f"disk_bytes is {self.disk_bytes}; it must hold a slab of {self.slab_bytes} bytes or be 0")
        return self

    def policy(self) -> CachePolicy:
        """What the policy file says. Raises SettingsError."""
        return read_policy(Path(self.policy_file)) if self.policy_file else CachePolicy()

    def with_sizes_of(self, policy: CachePolicy) -> Self:
        """These settings with the sizes and times that `policy` names.

        Raises SettingsError for one that is told in both places, or that does not fit.
        """
        told = {
            "memory_bytes": policy.memory_bytes,
            "disk_bytes": policy.disk_bytes,
            "block_ttl_s": policy.blocks.ttl_s if policy.blocks else None,
        }
        told = {name: value for name, value in told.items() if value is not None}
        for name, tier in (("memory_bytes", policy.memory), ("disk_bytes", policy.disk)):
            guaranteed = sum(quota.guaranteed_bytes for quota in tier.quotas.values())
            size = told.get(name) or getattr(self, name)
            if guaranteed > size:
                raise SettingsError(
                    f"{self.policy_file}: tenants are guaranteed {guaranteed} bytes, {name} is {size}",
                    field="tenants",
                    value=guaranteed,
                    allowed=f"at most {name} together",
                )
        for name in told:
            if name in self.model_fields_set:
                raise SettingsError(
                    f"{name} is {getattr(self, name)}, and {self.policy_file} tells it too; allowed: one of the two",
                    field=name,
                    value=getattr(self, name),
                    allowed="one of the two",
                )
        if not told:
            return self
        try:
            return type(self)(**(self.model_dump() | told))
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise SettingsError(f"{self.policy_file}: {message}", field="policy_file", value=self.policy_file) from None
