"""The sources of instance addresses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from katydid_cache.instances import Instances
from katydid_runtime.errors import SettingsError


def test_a_list_is_known_at_once_and_never_changes() -> None:
    instances = Instances("b:7301, a:7301,b:7301,unix:/run/cache.sock")
    assert instances.addresses == ("b:7301", "a:7301", "unix:/run/cache.sock")
    assert not instances.changing
    assert not asyncio.run(instances.refresh())


def test_a_file_is_read_again_and_trouble_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "instances"
    instances = Instances(f"file:{file}")

    async def scenario() -> None:
        assert not await instances.refresh(), "a file that is not there names nobody"
        file.write_text("# the first\na:7301\n\nb:7301 # the second\nno address\n")
        assert await instances.refresh()
        assert instances.addresses == ("a:7301", "b:7301")
        file.write_text("")
        assert not await instances.refresh()
        file.unlink()
        assert not await instances.refresh()
        assert instances.addresses == ("a:7301", "b:7301")
        file.write_text("b:7301\n")
        assert await instances.refresh()
        assert instances.addresses == ("b:7301",)

    asyncio.run(scenario())


def test_a_name_is_resolved() -> None:
    instances = Instances("dns:localhost:7301")
    assert asyncio.run(instances.refresh())
    assert set(instances.addresses) <= {"127.0.0.1:7301", "[::1]:7301"}
    unknown = Instances("dns:no-such-host.invalid:7301")
    assert not asyncio.run(unknown.refresh())


@pytest.mark.parametrize("source", ["nonsense", "a:0", "a:70000", "a:7301,b", "dns:name", ":7301"])
def test_a_malformed_source_is_refused_by_name(source: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Instances(source)
    assert caught.value.value == source
