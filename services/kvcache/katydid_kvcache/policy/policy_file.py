"""The policy file: tiers, times to live, sharing and quotas in YAML; a bad one is refused by line, field and value.

    tiers:
      memory: {bytes: 64GiB, eviction: lru, admission: adaptive}
      disk: {bytes: 1TiB}
      shared: {admission: second_touch, ttl: 7d}
    ttl:
      blocks: {after: 1d, sliding: true}
      sessions: {after: 30m, sliding: true}
    sharing: public_prefix
    tenants:
      each: {memory: {limit: 8GiB}}
      00112233445566778899aabbccddeeff: {memory: {guaranteed: 4GiB, limit: 16GiB}, disk: {limit: 200GiB}}

Everything may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from katydid_runtime.errors import SettingsError

from katydid_kvcache.policy.admission import ADMISSIONS
from katydid_kvcache.policy.eviction import EVICTIONS
from katydid_kvcache.policy.lifetimes import Lifetime
from katydid_kvcache.policy.pools import Quota, TierPolicy
from katydid_kvcache.policy.sharing import SHARINGS

__all__ = ["CachePolicy", "SharedPolicy", "parse_policy", "read_policy"]

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(|KiB|MiB|GiB|TiB)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(|s|m|h|d)")
_TENANT = re.compile(r"[0-9a-f]{32}")
_EACH = "each"
_QUOTA_TIERS = ("memory", "disk")


@dataclass(frozen=True, slots=True)
class SharedPolicy:
    """What goes to the shared store, and how long it may stay there (`ttl_s`; 0: as long as the block lives)."""

    admission: str = "second_touch"
    ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """A policy file's content; sizes that it does not name are None."""

    memory: TierPolicy = field(default_factory=TierPolicy)
    disk: TierPolicy = field(default_factory=TierPolicy)
    shared: SharedPolicy = field(default_factory=SharedPolicy)
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    blocks: Lifetime | None = None
    sessions: Lifetime = field(default_factory=Lifetime)
    sharing: str = "public_prefix"


@dataclass(slots=True)
class _Tier:
    size: int | None = None
    eviction: str = "lru"
    admission: str = "adaptive"
    quotas: dict[bytes, Quota] = field(default_factory=dict)
    each: Quota | None = None

    def policy(self) -> TierPolicy:
        return TierPolicy(self.eviction, self.admission, self.quotas, self.each)


def read_policy(path: Path) -> CachePolicy:
    """The policy in a file. Raises SettingsError naming file, line, field, value and what is allowed."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(
            f"policy_file {path} can't be read: {reason}", field="policy_file", value=str(path)
        ) from None
    return parse_policy(text, str(path))


def parse_policy(text: str, name: str) -> CachePolicy:
    """The policy in `text`; `name` stands before the line number in errors. Raises SettingsError."""
    return _Reader(name).read(text)


class _Reader:
    """Walks the nodes of one document; every refusal knows its line."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read(self, text: str) -> CachePolicy:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise SettingsError(
                f"{self._name}:{mark.line + 1 if mark else 1}: not YAML: {error.problem}",
                field="policy_file",
                value=self._name,
                allowed="YAML",
            ) from None
        except yaml.YAMLError as error:
            raise SettingsError(f"{self._name}:1: not YAML: {error}", field="policy_file", allowed="YAML") from None
        if root is None:
            return CachePolicy()
        top = self._fields(root, "", ("tiers", "ttl", "sharing", "tenants"))
        tiers = {name: _Tier() for name in _QUOTA_TIERS}
        shared = SharedPolicy()
        if "tiers" in top:
            for tier, node in self._fields(top["tiers"], "tiers", ("memory", "disk", "shared")).items():
                if tier == "shared":
                    shared = self._shared(node)
                else:
                    self._tier(node, tier, tiers[tier])
        ttl = self._fields(top["ttl"], "ttl", ("blocks", "sessions")) if "ttl" in top else {}
        if "tenants" in top:
            self._tenants(top["tenants"], tiers)
        return CachePolicy(
            memory=tiers["memory"].policy(),
            disk=tiers["disk"].policy(),
            shared=shared,
            memory_bytes=tiers["memory"].size,
            disk_bytes=tiers["disk"].size,
            blocks=self._lifetime(ttl["blocks"], "ttl.blocks") if "blocks" in ttl else None,
            sessions=self._lifetime(ttl["sessions"], "ttl.sessions") if "sessions" in ttl else Lifetime(),
            sharing=self._choice(top["sharing"], "sharing", SHARINGS) if "sharing" in top else "public_prefix",
        )

    def _tier(self, node: yaml.Node, name: str, tier: _Tier) -> None:
        path = f"tiers.{name}"
        fields = self._fields(node, path, ("bytes", "eviction", "admission"))
        if "bytes" in fields:
            tier.size = self._size(fields["bytes"], f"{path}.bytes")
        if "eviction" in fields:
            tier.eviction = self._choice(fields["eviction"], f"{path}.eviction", EVICTIONS)
        if "admission" in fields:
            tier.admission = self._choice(fields["admission"], f"{path}.admission", ADMISSIONS)

    def _shared(self, node: yaml.Node) -> SharedPolicy:
        fields = self._fields(node, "tiers.shared", ("admission", "ttl"))
        # Nothing is displaced in the shared store, so there is nothing for `adaptive` to weigh.
        rules = [rule for rule in ADMISSIONS if rule != "adaptive"]
        admission, ttl_s = SharedPolicy().admission, 0.0
        if "admission" in fields:
            admission = self._choice(fields["admission"], "tiers.shared.admission", rules)
        if "ttl" in fields:
            ttl_s = self._duration(fields["ttl"], "tiers.shared.ttl")
        return SharedPolicy(admission, ttl_s)

    def _tenants(self, node: yaml.Node, tiers: Mapping[str, _Tier]) -> None:
        guaranteed = dict.fromkeys(tiers, 0)
        for tenant, tenant_node in self._entries(node, "tenants"):
            path = f"tenants.{tenant}"
            if tenant != _EACH and not _TENANT.fullmatch(tenant):
                raise self._refusal(tenant_node, path, tenant, f"{_EACH}, or a tenant id of 32 hexadecimal digits")
            for name, quota_node in self._fields(tenant_node, path, _QUOTA_TIERS).items():
                quota = self._quota(quota_node, f"{path}.{name}", each=tenant == _EACH)
                tier = tiers[name]
                if tenant == _EACH:
                    tier.each = quota
                    continue
                tier.quotas[bytes.fromhex(tenant)] = quota
                guaranteed[name] += quota.guaranteed_bytes
                if tier.size is not None and guaranteed[name] > tier.size:
                    raise self._refusal(
                        quota_node,
                        f"{path}.{name}.guaranteed",
                        quota.guaranteed_bytes,
                        f"guarantees of at most {tier.size} bytes together, the size of the tier",
                    )

    def _quota(self, node: yaml.Node, path: str, *, each: bool) -> Quota:
        fields = self._fields(node, path, ("limit",) if each else ("guaranteed", "limit"))
        sizes = {name: self._size(value, f"{path}.{name}") for name, value in fields.items()}
        quota = Quota(sizes.get("guaranteed", 0), sizes.get("limit", 0))
        if 0 < quota.limit_bytes < quota.guaranteed_bytes:
            raise self._refusal(fields["limit"], f"{path}.limit", quota.limit_bytes, "at least what is guaranteed")
        return quota

    def _lifetime(self, node: yaml.Node, path: str) -> Lifetime:
        fields = self._fields(node, path, ("after", "sliding"))
        ttl_s = self._duration(fields["after"], f"{path}.after") if "after" in fields else 0.0
        sliding = (
            "sliding" in fields and self._choice(fields["sliding"], f"{path}.sliding", ("true", "false")) == "true"
        )
        return Lifetime(ttl_s, sliding)

    def _size(self, node: yaml.Node, path: str) -> int:
        return int(self._number(node, path, _SIZE, _UNITS, "a number of bytes, or one with KiB, MiB, GiB or TiB"))

    def _duration(self, node: yaml.Node, path: str) -> float:
        return self._number(node, path, _DURATION, _SECONDS, "a number of seconds, or one with s, m, h or d")

    def _number(
        self, node: yaml.Node, path: str, form: re.Pattern[str], units: Mapping[str, int], allowed: str
    ) -> float:
        text = self._scalar(node, path, allowed)
        found = form.fullmatch(text)
        if found is None or float(found[1]) <= 0:
            raise self._refusal(node, path, text, allowed + ", above 0")
        return float(found[1]) * units[found[2]]

    def _choice(self, node: yaml.Node, path: str, allowed: Sequence[str]) -> str:
        text = self._scalar(node, path, ", ".join(allowed))
        if text not in allowed:
            raise self._refusal(node, path, text, ", ".join(allowed))
        return text

    def _scalar(self, node: yaml.Node, path: str, allowed: str) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._refusal(node, path, "a list or mapping", allowed)
        return str(node.value)

    def _fields(self, node: yaml.Node, path: str, known: Sequence[str]) -> dict[str, yaml.Node]:
        """The values of a mapping whose keys must be of `known`."""
        fields = {}
        for key, value in self._entries(node, path):
            if key not in known:
                raise self._refusal(value, f"{path}.{key}".lstrip("."), key, ", ".join(known), what="is unknown")
            fields[key] = value
        return fields

    def _entries(self, node: yaml.Node, path: str) -> list[tuple[str, yaml.Node]]:
        """Keys and values of a mapping, no key twice."""
        if not isinstance(node, yaml.MappingNode):
            value = node.value if isinstance(node, yaml.ScalarNode) else "a list"
            raise self._refusal(node, path or "the file", value, "a mapping")
        entries: list[tuple[str, yaml.Node]] = []
        for key_node, value in node.value:
            key = self._scalar(key_node, path, "a name")
            if any(key == other for other, _ in entries):
                raise self._refusal(key_node, f"{path}.{key}".lstrip("."), key, "every field once")
            entries.append((key, value))
        return entries

    def _refusal(self, node: yaml.Node, path: str, value: Any, allowed: str, *, what: str = "") -> SettingsError:
        line = node.start_mark.line + 1
        return SettingsError(
            f"{self._name}:{line}: {path} {what or f'is {value}'}; allowed: {allowed}",
            field=path,
            value=str(value),
            allowed=allowed,
        )
