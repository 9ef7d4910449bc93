"""A small random model of each family that the engine runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from katydid_engine.loader import load_model
from katydid_engine.models.decoder_lm import DecoderLM

from tests.engine.models.families import FAMILIES, Family, make_family


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def model(family: Family) -> DecoderLM:
    return load_model(family.folder)
