"""The console's routes: files under a strict policy, data behind the key, nothing that was said."""

from __future__ import annotations

import asyncio
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from katydid_gateway.recent_requests import MOST, RecentRequest, RecentRequests, Stretch, stretches
from katydid_gateway.requests import Usage

from tests.gateway.mock_options import MockOptions
from tests.gateway.rig import rig, until

SECRET = "a sentence that must not be kept"


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("".join(f"{name} {sha256(name.encode()).hexdigest()}\n" for name in ("alice", "bob")))
    return str(path)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def test_the_page_and_its_files(chatml: Path) -> None:
    async def scenario() -> None:
        async with rig(chatml) as built:
            assert (await built.http.get("/console")).headers["location"] == "console/"
            page = await built.http.get("/console/")
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=|https?://", page.text), (
                "nothing inline or foreign"
            )
            named = re.findall(r'(?:href|src)="([\w.]+)"', page.text)
            seen: set[str] = set()
            while named:
                name = named.pop()
                if name not in seen:
                    seen.add(name)
                    file = await built.http.get(f"/console/{name}")
                    assert file.status_code == 200, name
                    named += re.findall(r'from "\./([\w.]+)"', file.text)
            assert {"app.js", "chat.js", "dom.js", "console.css", "icon.svg"} <= seen
            for missing in ("nothing.js", "__init__.py", "..%2fsettings.py"):
                assert (await built.http.get(f"/console/{missing}")).status_code == 404

    run(scenario)


def test_off_with_one_setting(chatml: Path) -> None:
    async def scenario() -> None:
        async with rig(chatml, console=False) as built:
            for path in ("/console", "/console/", "/console/app.js", "/console/api/fleet"):
                assert (await built.http.get(path)).status_code == 404

    run(scenario)


def test_data_needs_the_key_and_each_tenant_sees_its_own(chatml: Path, keys: str) -> None:
    async def scenario() -> None:
        async with rig(chatml, options=MockOptions(prefill_s=0.02, fetch_s=0.01), api_keys_file=keys) as built:
            for path in ("fleet", "requests", "requests/x"):
                assert (await built.http.get(f"/console/api/{path}")).status_code == 401
            explain = {"messages": [{"role": "user", "content": "x"}]}
            assert (await built.http.post("/console/api/explain", json=explain)).status_code == 401
            built.http.headers.update(bearer("alice"))
            answer = await built.chat(SECRET)
            name = answer.headers["x-request-id"]
            await until(lambda: built.gateway.generator.recent.get("alice", name) is not None)
            listed = await built.http.get("/console/api/requests")
            assert listed.headers["cache-control"] == "no-store"
            assert SECRET not in listed.text
            (request,) = listed.json()["requests"]
            assert request == (await built.http.get(f"/console/api/requests/{name}")).json()
            assert (request["id"], request["outcome"], request["engine"]) == (name, "ok", "engine-0")
            lengths = {bar["name"]: bar["length_s"] for bar in request["stretches"]}
            assert lengths["prefill"] >= 0.02
            assert lengths["fetch"] >= 0.01
            before = sum(length for bar, length in lengths.items() if bar != "decode")
            assert before == pytest.approx(request["ttft_s"], abs=2e-3)
            built.http.headers.update(bearer("bob"))
            assert (await built.http.get("/console/api/requests")).json() == {"requests": []}
            assert (await built.http.get(f"/console/api/requests/{name}")).status_code == 404

    run(scenario)


def test_the_fleet_as_it_is(chatml: Path) -> None:
    async def scenario() -> None:
        async with rig(chatml, engines=2) as built:
            await built.chat()
            await until(built.gateway.generator.idle.is_set)
            view = (await built.http.get("/console/api/fleet")).json()
            assert view["model"] == "mock"
            assert [(each["name"], each["state"]) for each in view["engines"]] == [
                ("engine-0", "ready"),
                ("engine-1", "ready"),
            ]
            assert view["totals"]["requests"] == view["outcomes"]["ok"] == 1
            assert view["totals"]["answered"] == view["within"]["ttft"] == 1
            assert view["totals"]["output_tokens"] == 8
            found = sum(view["cached_tokens"].values()) + view["totals"]["computed_tokens"]
            assert found == view["totals"]["prompt_tokens"] > 0

    run(scenario)


def test_where_a_prompt_would_go(chatml: Path) -> None:
    async def scenario() -> None:
        async with rig(chatml, engines=2) as built:
            body = {"messages": [{"role": "user", "content": "hello " * 200}]}
            answer = (await built.http.post("/console/api/explain", json=body)).json()
            assert [each["engine"] for each in answer["candidates"]] in (
                ["engine-0", "engine-1"],
                ["engine-1", "engine-0"],
            )
            first = answer["candidates"][0]
            assert first["ttft_s"] == pytest.approx(first["queue_s"] + first["fetch_s"] + first["prefill_s"])
            body["without_engine"] = first["engine"]
            other = (await built.http.post("/console/api/explain", json=body)).json()
            assert other["candidates"][0]["engine"] != first["engine"]
            assert other["candidates"][1]["excluded"] == "left out"
            body["without_engine"] = "nobody"
            assert (await built.http.post("/console/api/explain", json=body)).json()["error"][
                "param"
            ] == "without_engine"

    run(scenario)


def test_bars_stand_behind_each_other_and_decoding_after_the_first_token() -> None:
    phases = {"prefill": 0.5, "receive": 0.1, "fetch": 0.3, "rest": 0.0, "novel": 0.05}
    bars = stretches(phases, [("memory", 0.1), ("disk", 0.2)], 0.95, 2.0)
    assert [(bar.name, bar.tier) for bar in bars] == [
        ("receive", ""),
        ("fetch", "memory"),
        ("fetch", "disk"),
        ("prefill", ""),
        ("novel", ""),
        ("decode", ""),
    ]
    ends = [bar.begin_s + bar.length_s for bar in bars]
    assert [bar.begin_s for bar in bars] == pytest.approx([0.0, *ends[:-1]])
    assert bars[-1] == Stretch("decode", 0.95, 2.0)


def test_so_many_are_kept_and_the_oldest_leave() -> None:
    kept = RecentRequests()
    for number in range(MOST + 10):
        request = RecentRequest(f"r{number}", "chat", "ok", number, "e", "", Usage(1, 1), 0.1, 0.1, {})
        kept.add("a" if number % 2 else "b", request)
    assert len(kept) == MOST
    assert kept.get("b", "r8") is None
    assert kept.get("b", "r10") is not None
    assert [request.request_id for request in kept.of("a", 2)] == [f"r{MOST + 9}", f"r{MOST + 7}"]
