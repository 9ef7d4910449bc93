"""Services find all they import among what their extra installs: an image has nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Runs in a process of its own: modules of distributions that the extra does not ask for cannot be imported there.
PROGRAM = """
import importlib, pkgutil, sys
from importlib.abc import MetaPathFinder
from importlib.metadata import distribution, packages_distributions
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

extra, *packages = sys.argv[1:]
asked, waiting = set(), [("katydid", frozenset([extra]))]
while waiting:
    name, extras = waiting.pop()
    if (name, extras) in asked:
        continue
    asked.add((name, extras))
    for text in distribution(name).requires or ():
        wanted = Requirement(text)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": each}) for each in extras or [""]):
            waiting.append((canonicalize_name(wanted.name), frozenset(wanted.extras)))
there = {name for name, _ in asked}
owners = {module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()}

class Missing(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in owners and not owners[fullname.partition(".")[0]] & there:
            raise ModuleNotFoundError(f"{fullname} is not in the extra {extra}", name=fullname)

for module in [name for name in sys.modules if name.partition(".")[0] == "packaging"]:
    del sys.modules[module]
sys.meta_path.insert(0, Missing())
for package in packages:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
"""


@pytest.mark.parametrize("service", ["gateway", "kvcache"])
def test_a_service_imports_what_its_extra_installs(service: str) -> None:
    command = [sys.executable, "-c", PROGRAM, service, f"katydid_{service}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
