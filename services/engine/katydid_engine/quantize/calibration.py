"""The tokens a model is quantised by: texts that are given, an installed package's, or what the model itself writes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from katydid_runtime.errors import SettingsError
from tokenizers import Tokenizer
from torch import Tensor

from katydid_engine.forward_batch import PAGE_SIZE, ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.quantize.recipe import Calibration

__all__ = ["calibration_ids"]

_GENERATED = "generated"
_PACKAGE = "python:"
_TEXTS = (".py", ".md", ".rst", ".txt")
_BATCH = 32


def calibration_ids(folder: Path, options: Calibration, *, device: str) -> Tensor:
    """int64 ``[sequences, tokens]``, the same for the same folder and options.

    Raises:
        SettingsError: a source that does not exist, or has less text than is asked of it.
    """
    parts = []
    for index, source in enumerate(options.sources):
        count = (options.sequences * (index + 1)) // len(options.sources) - (options.sequences * index) // len(
            options.sources
        )
        if source == _GENERATED:
            parts.append(_generate(folder, count, options, device))
        else:
            parts.append(_cut(_tokens(folder, source), source, count, options))
    return torch.cat(parts)


def _cut(ids: Sequence[int], source: str, count: int, options: Calibration) -> Tensor:
    """``count`` of the consecutive sequences that ``ids`` hold, drawn by the seed."""
    whole = len(ids) // options.tokens
    if whole < count:
        raise SettingsError(
            f"calibration source {source!r} has {len(ids)} tokens, {count} sequences of {options.tokens} are wanted",
            field="calibration.sources",
            value=source,
            allowed=f">= {count * options.tokens} tokens",
        )
    generator = torch.Generator().manual_seed(options.seed)
    chosen = torch.randperm(whole, generator=generator)[:count].sort().values
    return torch.tensor(ids[: whole * options.tokens]).view(whole, options.tokens)[chosen]


def _tokens(folder: Path, source: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = list(_texts(source))
    return [token for encoded in tokenizer.encode_batch_fast(texts) for token in encoded.ids]


def _texts(source: str) -> Iterator[str]:
    root = _package(source.removeprefix(_PACKAGE)) if source.startswith(_PACKAGE) else Path(source).expanduser()
    if not root.exists():
        raise SettingsError(
            f"calibration source {source!r} does not exist",
            field="calibration.sources",
            value=source,
            allowed="generated, python:PACKAGE, or a text file or folder",
        )
    paths = sorted(path for path in root.rglob("*") if path.suffix in _TEXTS) if root.is_dir() else [root]
    for path in paths:
        yield path.read_text(encoding="utf-8", errors="replace")


def _package(name: str) -> Path:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise SettingsError(
            f"calibration source: no package {name!r} is installed", field="calibration.sources", value=name
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _generate(folder: Path, count: int, options: Calibration, device: str) -> Tensor:
    """Sampled at temperature 1 behind the model's first token, or a random one; the whole model is loaded."""
    model = load_model(folder, device=device)
    config = model.config
    generator = torch.Generator().manual_seed(options.seed)
    pages = -(-options.tokens // PAGE_SIZE)
    written = []
    for begin in range(0, count, _BATCH):
        rows = min(_BATCH, count - begin)
        ids = torch.empty(rows, options.tokens, dtype=torch.int64)
        first = torch.randint(config.vocab_size, (rows,), generator=generator)
        ids[:, 0] = first if config.bos_token_id is None else config.bos_token_id
        cache = model.new_kv_cache(rows * pages)
        tables = [range(row * pages, (row + 1) * pages) for row in range(rows)]
        for position in range(options.tokens - 1):
            runs = [TokenRun([int(ids[row, position])], position, tables[row]) for row in range(rows)]
            hidden = model.forward(ForwardBatch.pack(runs, num_decodes=rows, device=model.device), cache)
            shares = model.logits(hidden).float().softmax(-1).cpu()
            ids[:, position + 1] = torch.multinomial(shares, 1, generator=generator).squeeze(1)
        written.append(ids)
    return torch.cat(written)
