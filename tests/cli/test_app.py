"""The command line itself: exit codes, one line for what was asked wrongly, quick start."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from katydid_cli.__main__ import run
from katydid_cli.model_folder import FALLBACK, resolve_model
from katydid_runtime.errors import ModelFolderError, SettingsError, UnauthenticatedError, UnknownModelError


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["fly"], "No such command 'fly'"),
        (["up", "--wings", "2"], "No such option: --wings"),
        (["up", "--port", "70000"], "Invalid value for '--port'"),
        (["up", "--grpc-port", "0"], "Invalid value for '--grpc-port'"),
        (["up", "--kv-memory-mb", "0"], "Invalid value for '--kv-memory-mb'"),
        (["up", "--engines", "many"], "Invalid value for '--engines'"),
        (["up", "--model", "gpt-17"], "model 'gpt-17' is neither a folder nor one of"),
        (["models", "prepare", "gpt-17"], "gpt-17"),
        (["models", "verify", "hy3-tiny"], "comes with the code"),
        (["models", "verify", FALLBACK, "--cache-dir", "/no/such/folder"], "not a prepared model"),
        (["trace", "/no/such/file"], "cannot read trace file /no/such/file"),
        (["bench", "--rate", "0"], "--rate=0.0: must be more than 0"),
        (["bench", "--rate", "nan"], "--rate=nan: must be more than 0"),
        (["bench", "--rate", "inf"], "--rate=inf: must be more than 0 and finite"),
        (["bench", "--timeout-s", "0"], "--timeout-s=0.0: must be more than 0"),
        (["bench", "--tpot-target-s", "-1"], "--tpot-target-s=-1.0: must be more than 0"),
        (["bench", "--think-s", "-1"], "Invalid value for '--think-s'"),
        (["bench", "--output", "FOLDER"], "is a folder"),
        (["simulate", "--rate", "0"], "--rate=0.0: must be more than 0"),
        (["simulate", "--rate", "nan"], "--rate=nan: must be more than 0"),
        (["simulate", "--rate-scale", "-1"], "--rate-scale=-1.0: must be more than 0"),
        (["simulate", "--prefill-speed", "0"], "--prefill-speed=0.0: must be more than 0"),
        (["simulate", "--step-ms", "-1"], "--step-ms=-1.0: must be more than 0"),
        (["simulate", "--output", "/proc/none/x.json"], "--output: cannot write to /proc/none"),
        (["up", "--metrics-port", "65535"], "--metrics-port=65535: the last engine's would be 65536, allowed is 65535"),
        (["up", "--start-timeout-s", "nan"], "--start-timeout-s=nan: must be more than 0"),
        (["cache", "pin", "aaaa", "00", "--hold-s", "1e300"], "Invalid value for '--hold-s'"),
        (["cache", "flush", "--timeout-s", "1e300"], "Invalid value for '--timeout-s'"),
        (["bench", "--output", "/proc/none/report.json"], "--output: cannot write to /proc/none"),
        (["eval", "--model", "FOLDER", "--output", "FOLDER"], "is a folder"),
        (["bench", "--workload", "replay"], "--workload=replay needs --replay FILE"),
        (["bench", "--workload", "dance"], "Invalid value for '--workload': 'dance' is not one of"),
        (["eval", "--model", "gpt-17"], "model 'gpt-17' is neither a folder nor one of"),
        (["eval", "--model", "FOLDER", "--task", "poetry"], "poetry"),
        (["eval", "--model", "hy3-tiny", "--extent", "epic"], "extent is 'epic'; allowed: exhaustive, full, quick"),
        (["quantize", "gpt-17", "OUT"], "model 'gpt-17' is neither a folder nor one of"),
        (["quantize", "FOLDER", "FOLDER/out"], "lies in the model's own folder"),
        (["quantize", "hy3-tiny", "FOLDER"], "is not empty"),
        (["quantize", "hy3-tiny", "/proc/none/out"], "OUT: cannot write to /proc/none"),
        (["quantize", "hy3-tiny", "FOLDER", "--scheme", "int2"], "Invalid value for '--scheme'"),
    ],
)
def test_what_was_asked_wrongly_is_one_line_and_exit_code_2(argv, complaint, capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert run([word.replace("FOLDER", str(tmp_path)) for word in argv]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("katydid: ")
    assert complaint in line


@pytest.mark.parametrize("argv", [["chat"], ["bench"]])
def test_no_gateway_is_one_line_and_exit_code_1(argv, capsys):
    assert run([*argv, "--address", "127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "the connection to 127.0.0.1:1 failed" in line


@pytest.mark.parametrize(
    ("argv", "place", "hint"),
    [
        (["chat"], "katydid_cli.chat.chat", "--api-key or KATYDID_API_KEY"),
        (["bench"], "katydid_cli.load.bench.bench", "--api-key or KATYDID_API_KEY"),
    ],
)
def test_who_lacks_a_key_hears_how_to_show_one(argv, place, hint, capsys, monkeypatch):
    def refuse(*_):
        raise UnauthenticatedError("no API key was given")

    monkeypatch.setattr(place, refuse)
    assert run(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("katydid: ")
    assert "no API key was given" in line
    assert hint in line


def test_version(capsys):
    assert run(["--version"]) == 0
    assert re.fullmatch(r"katydid \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_quantize(tmp_path, capsys):
    assert run(["quantize", "hy3-tiny", str(tmp_path / "out"), "--scheme", "w8a8"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(rf"{tmp_path}/out: 337 matrices in w8a8, 19.8 MiB -> 12.1 MiB, \d+\.\d s", line)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_help(capsys):
    assert run([]) == 0
    commands = capsys.readouterr().out
    for command in (
        "up",
        "serve-gateway",
        "serve-engine",
        "serve-kvcache",
        "chat",
        "bench",
        "trace",
        "eval",
        "quantize",
    ):
        assert command in commands
    assert run(["up", "--help"]) == 0
    assert "--kv-disk-dir" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["slice", "workload"])
def test_a_bench_of_the_engine_gets_its_words(name, monkeypatch):
    handed = []
    monkeypatch.setattr("os.execv", lambda path, words: handed.append((path, words)))
    assert run(["bench", name, "--plan", "tp8", "--rank", "3"]) == 0
    words = [sys.executable, "-m", "katydid_engine.rank_slice", name, "--plan", "tp8", "--rank", "3"]
    assert handed == [(sys.executable, words)]


def test_a_group_alone_shows_what_it_has(capsys):
    assert run(["models"]) == 0
    assert "prepare" in capsys.readouterr().out


def test_help_imports_nothing_heavy():
    code = """
import sys
from katydid_cli.__main__ import run
run(["--help"])
heavy = {"grpc", "torch", "numpy", "gguf", "tokenizers", "opentelemetry", "pydantic"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_an_embedded_or_named_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("katydid_cli.model_folder.embedded_folder", lambda: tmp_path)
    assert resolve_model(None, tmp_path / "cache") == tmp_path
    assert resolve_model("hy3-tiny", tmp_path / "cache") == tmp_path
    assert resolve_model(str(tmp_path), tmp_path / "cache") == tmp_path.resolve()


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelFolderError, match="no model folder: it has no config"):
        resolve_model(str(tmp_path), tmp_path)


def test_the_embedded_model_is_unknown_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("katydid_cli.model_folder.embedded_folder", lambda: None)
    with pytest.raises(UnknownModelError, match="neither a folder nor one of SmolLM2"):
        resolve_model("hy3-tiny", tmp_path)


def test_an_unwritable_cache_directory_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("katydid_cli.model_folder.embedded_folder", lambda: None)
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="file"):
        resolve_model(None, tmp_path / "file")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["chat"], "what listens there is no gateway; --address"),
        (["cache", "flush"], "no cache service, or has its AdminService elsewhere (admin_listen)"),
        (["gateway", "engines"], "no gateway's AdminService (admin_listen)"),
    ],
)
def test_an_address_of_another_service_is_told(argv, told, capsys):
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert run([*argv, "--address", f"127.0.0.1:{port}"]) == 2
    finally:
        server.stop(None)
    assert told in capsys.readouterr().err
