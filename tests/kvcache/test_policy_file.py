"""The policy file: what is written is meant, and what is wrong is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_kvcache.policy.lifetimes import Lifetime
from katydid_kvcache.policy.policy_file import CachePolicy, SharedPolicy, parse_policy, read_policy
from katydid_kvcache.policy.pools import Quota
from katydid_kvcache.settings import KvCacheSettings
from katydid_runtime.errors import SettingsError

WHOLE = """
tiers:
  memory: {bytes: 64GiB, eviction: arc, admission: second_touch}
  disk:
    bytes: 1.5 TiB
  shared: {admission: all, ttl: 7d}
ttl:
  blocks: {after: 90, sliding: true}
  sessions: {after: 30m}
sharing: tenant
tenants:
  each: {memory: {limit: 8GiB}}
  00112233445566778899aabbccddeeff: {memory: {guaranteed: 4GiB, limit: 16GiB}, disk: {limit: 200GiB}}
"""
GIB = 1 << 30
ID = "0" * 32
TENANT = bytes.fromhex("00112233445566778899aabbccddeeff")


def test_a_whole_file() -> None:
    policy = parse_policy(WHOLE, "p.yaml")
    assert (policy.memory_bytes, policy.disk_bytes) == (64 * GIB, 1536 * GIB)
    assert (policy.memory.eviction, policy.memory.admission) == ("arc", "second_touch")
    assert (policy.disk.eviction, policy.disk.admission) == ("lru", "adaptive")
    assert policy.shared == SharedPolicy("all", 7 * 86_400)
    assert (policy.blocks, policy.sessions) == (Lifetime(90, sliding=True), Lifetime(1800))
    assert policy.sharing == "tenant"
    assert policy.memory.each == Quota(limit_bytes=8 * GIB)
    assert policy.memory.quotas == {TENANT: Quota(4 * GIB, 16 * GIB)}
    assert policy.disk.quotas == {TENANT: Quota(0, 200 * GIB)}


@pytest.mark.parametrize("text", ["", "# nothing\n", "tiers: {}\n"])
def test_everything_may_be_left_out(text: str) -> None:
    assert parse_policy(text, "p.yaml") == CachePolicy()


@pytest.mark.parametrize(
    ("text", "line", "field", "value", "allowed"),
    [
        ("tiers:\n  memory: {eviction: fifo}\n", 2, "tiers.memory.eviction", "fifo", "lru, lfu, arc, s3fifo"),
        ("tiers:\n  disk:\n    admission: never\n", 3, "tiers.disk.admission", "never", "adaptive"),
        ("tiers:\n  shared: {admission: adaptive}\n", 2, "tiers.shared.admission", "adaptive", "all, second_touch"),
        ("tiers:\n  memory:\n    bytes: 64GB\n", 3, "tiers.memory.bytes", "64GB", "GiB"),
        ("tiers:\n  memory:\n    bytes: 0\n", 3, "tiers.memory.bytes", "0", "above 0"),
        ("tiers:\n  memory:\n    bytes: [1]\n", 3, "tiers.memory.bytes", "a list or mapping", "a number of bytes"),
        ("tiers:\n  tape: {}\n", 2, "tiers.tape", "tape", "memory, disk, shared"),
        ("tiers:\n  memory: {}\n  memory: {}\n", 3, "tiers.memory", "memory", "once"),
        ("ttl:\n  blocks: {after: soon}\n", 2, "ttl.blocks.after", "soon", "s, m, h or d"),
        ("ttl:\n  blocks: {sliding: maybe}\n", 2, "ttl.blocks.sliding", "maybe", "true, false"),
        ("sharing: everyone\n", 1, "sharing", "everyone", "public_prefix, tenant, none"),
        ("tenants:\n\n  alice: {}\n", 3, "tenants.alice", "alice", "32 hexadecimal digits"),
        ("tenants: {each: {disk: {guaranteed: 1}}}\n", 1, "tenants.each.disk.guaranteed", "guaranteed", "limit"),
        (f"tenants:\n  {ID}: {{disk: {{guaranteed: 2, limit: 1}}}}\n", 2, f"tenants.{ID}.disk.limit", "1", ""),
        (
            f"tiers: {{memory: {{bytes: 10}}}}\ntenants:\n  {'0' * 32}: {{memory: {{guaranteed: 6}}}}\n"
            f"  {'1' * 32}: {{memory: {{guaranteed: 5}}}}\n",
            4,
            f"tenants.{'1' * 32}.memory.guaranteed",
            "5",
            "10 bytes together",
        ),
        ("- a\n", 1, "the file", "a list", "a mapping"),
        ("tiers: {memory: [\n", 2, "policy_file", "p.yaml", "YAML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text: str, line: int, field: str, value: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_policy(text, "p.yaml")
    assert str(caught.value).startswith(f"p.yaml:{line}: ")
    assert caught.value.field == field
    assert value in str(caught.value.value)
    assert allowed in str(caught.value.allowed)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="tiersmodkybn:{}[],- \n\t\"'&*!%0123456789GiB", max_size=60))
def test_noise_is_a_policy_or_refused(text: str) -> None:
    refused = ""
    try:
        parse_policy(text, "p.yaml")
    except SettingsError as error:
        refused = str(error)
    assert not refused or refused.startswith("p.yaml:")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="can't be read"):
        read_policy(tmp_path / "none.yaml")


def test_the_example_of_the_documentation_is_a_policy() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "kvcache-policy.md").read_text()
    policy = parse_policy(page.partition("```yaml\n")[2].partition("```")[0], "page")
    assert policy.blocks == Lifetime(86_400, sliding=True)
    assert policy.memory.quotas == {TENANT: Quota(4 * GIB, 16 * GIB)}


def test_more_than_the_tier_has_can_not_be_guaranteed(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(f"tenants: {{'{ID}': {{memory: {{guaranteed: 2GiB}}}}}}")
    settings = KvCacheSettings(policy_file=str(path), memory_bytes=GIB)
    with pytest.raises(SettingsError, match="guaranteed 2147483648 bytes, memory_bytes is 1073741824"):
        settings.with_sizes_of(settings.policy())
