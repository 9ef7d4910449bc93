"""`katydid gateway` against a gateway with AdminService and keys."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path

import pytest
from katydid_cli.gateway_app import gateway_app
from katydid_runtime.errors import KatydidError, UnauthenticatedError
from typer.testing import CliRunner

from tests.gateway.model_folders import chatml_folder
from tests.gateway.rig import rig


def test_every_command_does_what_it_says(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"ops {sha256(b'k').hexdigest()} scopes=admin\n")

    async def scenario() -> None:
        folder = chatml_folder(tmp_path / "model")
        settings = {"admin_listen": "127.0.0.1:0", "engine_networks": "127.0.0.0/8", "api_keys_file": str(keys)}
        async with rig(folder, **settings) as built:
            target = ["--address", built.gateway.admin_address]

            async def run(*words: str, key: str = "k") -> tuple[int, str, BaseException | None]:
                given = [*words, *target, "--api-key", key]
                done = await asyncio.to_thread(CliRunner().invoke, gateway_app, given)
                return done.exit_code, done.output, done.exception

            code, text, _ = await run("posture")
            assert (code, "OPEN  prefix caches" in text, "set cache_salt_secret" in text) == (1, True, True)
            assert "engine-0" in (await run("engines"))[1]
            code, text, failure = await run("add-engine", "late=127.0.0.1:65001")
            assert (code, text, failure) == (0, "added, at 127.0.0.1:65001\n", None)
            assert "late" in (await run("engines"))[1]
            assert (await run("remove-engine", "late"))[0] == 0
            assert isinstance((await run("remove-engine", "late"))[2], KatydidError)
            assert (await run("drain"))[1] == "0 requests in flight\n"
            assert built.gateway.generator.draining
            await run("drain", "--resume")
            assert not built.gateway.generator.draining
            with pytest.raises(UnauthenticatedError):
                raise (await run("posture", key="x"))[2] or AssertionError

    asyncio.run(scenario())
