"""Model folders shared by the gateway's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", type=Path, help="folder that the console's tests put screenshots into")


@pytest.fixture
def pictures(request: pytest.FixtureRequest) -> Callable[[Any, str], None]:
    """Takes a picture of a page under a name, when it was asked for."""
    folder: Path | None = request.config.getoption("--pictures", default=None)

    def take(page: Any, name: str) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=folder / f"{name}.png")

    return take
