"""What cannot start says why in one line and ends with exit code 2, whichever service it is."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.e2e

ENGINE, KVCACHE, GATEWAY = "katydid_engine", "katydid_kvcache", "katydid_gateway"


def refused(module: str, *options: str) -> str:
    """The one line the process ends with."""
    done = subprocess.run([sys.executable, "-m", module, *options], capture_output=True, text=True, timeout=120)
    plain = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert (done.returncode, len(plain)) == (2, 1), done.stderr
    assert done.stdout == ""
    return plain[0]


def drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def misshape_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].contiguous()
    save_file(tensors, folder / "model.safetensors")


def corrupt_the_header(folder: Path) -> None:
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[8:12] = b"\xff\xff\xff\xff"
    (folder / "model.safetensors").write_bytes(weights)


def truncate_the_data(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])


def unknown_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "nosuchmodel"}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (drop_a_tensor, "model.layers.1.mlp.up_proj.weight"),
        (misshape_a_tensor, "model.norm.weight"),
        (corrupt_the_header, "model.safetensors"),
        (truncate_the_data, "model.safetensors"),
        (unknown_architecture, "nosuchmodel"),
    ],
)
def test_a_broken_model(tiny: Path, tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "broken"))
    damage(folder)
    assert said in refused(ENGINE, "--model", str(folder))


def test_a_port_in_use(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        model = ("--model", str(tiny))
        assert address in refused(ENGINE, *model, "--listen", address)
        assert address in refused(ENGINE, *model, "--http-listen", address)
        assert address in refused(KVCACHE, "--listen", address)
        assert address in refused(KVCACHE, "--http-listen", address)
        gateway = (GATEWAY, *model, "--engines", "127.0.0.1:1")
        assert address in refused(*gateway, "--listen", address, "--http-listen", "127.0.0.1:0")
        assert address in refused(*gateway, "--http-listen", address, "--listen", "127.0.0.1:0")


def test_a_cache_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        assert str(path) in refused(KVCACHE, "--disk-path", str(path))


def test_wrong_settings(tiny: Path) -> None:
    assert "nosuch" in refused(ENGINE, "--model", str(tiny), "--nosuch", "1")
    assert "kv-pages" in refused(ENGINE, "--model", str(tiny), "--kv-pages", "0")
    assert "memory_bytes" in refused(KVCACHE, "--memory-bytes", "1048576")
    assert "threads" in refused(ENGINE, "--model", str(tiny), "--threads", "many")
