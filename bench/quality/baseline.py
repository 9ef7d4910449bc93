"""Bits per byte of the interpolated 5-gram byte model that trains on the very text hy3-tiny trained on.

    python -m bench.quality.baseline DATA models/hy3-tiny --extent full

The held-out documents are those that `katydid eval` with the same extent measures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from katydid_cli.evaluation.bits import first_bytes
from katydid_cli.evaluation.held_out import Kind, load_held_out
from katydid_cli.evaluation.suite import EXTENTS
from tokenizers import Tokenizer, pre_tokenizers

from bench.quality.ngram import ByteNgram, Smoothing
from tools.hy3_tiny.batches import load_stream

ORDER = 5
SMOOTHINGS: tuple[Smoothing, ...] = ("witten-bell", "absolute-discounting")


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of every id of a byte-level tokenizer; special tokens are a line break."""
    alphabet = {chr(b): b for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
    rest = [b for b in range(256) if b not in alphabet.values()]
    alphabet |= {chr(256 + n): b for n, b in enumerate(rest)}
    if set(alphabet) != set(pre_tokenizers.ByteLevel.alphabet()):
        raise ValueError("the tokenizer's byte alphabet is not GPT-2's")
    special = set(tokenizer.get_added_tokens_decoder())
    texts = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    return [b"\n" if i in special else bytes(alphabet[c] for c in t or "") for i, t in enumerate(texts)]


def stream_text(stream: np.ndarray, table: list[bytes]) -> bytes:
    """The text of a token stream."""
    return b"".join(map(table.__getitem__, stream.tolist()))


def measure(data: Path, tokenizer: Tokenizer, kind: Kind, budget: int) -> dict[str, float | int | str]:
    """Bits per byte by smoothing, with the sizes of both texts."""
    model = ByteNgram(stream_text(load_stream(data, f"{kind}_train"), token_bytes(tokenizer)), ORDER)
    chosen = first_bytes(load_held_out(data, kind), budget)
    test = "\n".join(d.text for d in chosen).encode()
    found: dict[str, float | int | str] = {"kind": kind, "order": ORDER, "test_bytes": len(test)}
    return found | {smoothing: model.bits_per_byte(test, smoothing) for smoothing in SMOOTHINGS}


def main() -> None:
    parser = argparse.ArgumentParser(description="Bits per byte of an interpolated 5-gram byte model.")
    parser.add_argument("data", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--extent", choices=sorted(EXTENTS), default="full")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    extent = EXTENTS[args.extent]
    budgets: dict[Kind, int] = {"code": extent.code_bytes, "text": extent.text_bytes}
    for kind, budget in budgets.items():
        print(json.dumps(measure(args.data, tokenizer, kind, budget)), flush=True)


if __name__ == "__main__":
    main()
