"""Model folders shared by the gateway's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.gateway import model_folders


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folders.chatml_folder(tmp_path_factory.mktemp("models") / "chatml")


@pytest.fixture(scope="session")
def hy3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folders.hy3_folder(tmp_path_factory.mktemp("models") / "hy3")


@pytest.fixture(scope="session")
def chatml_tokenizer(chatml: Path) -> Tokenizer:
    return Tokenizer.from_file(str(chatml / "tokenizer.json"))
