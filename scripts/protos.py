"""Compiles the protos in place; with --check, says whether the checked-in stubs are what the protos give."""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).resolve().parent.parent / "protos"


def compile_into(out: Path) -> None:
    """Writes messages, service stubs and their types for every .proto under `protos/` into `out`."""
    sources = [str(path.relative_to(PROTOS)) for path in sorted(PROTOS.rglob("*.proto"))]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *sources]
    subprocess.run(command, check=True, cwd=PROTOS, env={**os.environ, "PATH": path}, stderr=subprocess.DEVNULL)


def stale_stubs() -> list[str]:
    """Names of checked-in stubs that differ from a fresh compile, are missing, or have no proto any more."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        compile_into(fresh)
        wanted = {path.relative_to(fresh) for path in fresh.rglob("*_pb2*.py*")}
        present = {path.relative_to(PROTOS) for path in PROTOS.rglob("*_pb2*.py*") if "__pycache__" not in path.parts}
        same = {p for p in wanted & present if filecmp.cmp(fresh / p, PROTOS / p, shallow=False)}
        return sorted(str(p) for p in (wanted | present) - same)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compile nothing; exit with 1 if stubs are stale")
    if not parser.parse_args().check:
        compile_into(PROTOS)
        return 0
    stale = stale_stubs()
    if stale:
        print("stale stubs, run `make protos`:", *stale, sep="\n  ")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
