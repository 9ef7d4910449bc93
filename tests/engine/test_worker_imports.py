"""The worker path needs nothing but torch, triton, numpy, safetensors and the standard library."""

from __future__ import annotations

import subprocess
import sys

ABSENT = ("grpc", "google.protobuf", "pydantic", "pydantic_settings", "msgspec", "opentelemetry", "prometheus_client",
          "lmdb", "obstore", "xxhash", "uvloop", "starlette", "tokenizers", "transformers")  # fmt: skip

PROGRAM = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None
import katydid_engine.worker, katydid_engine.rank
"""


def test_the_worker_imports_without_the_services_packages() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_face_imports_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import katydid_engine.engine, katydid_engine.settings"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
