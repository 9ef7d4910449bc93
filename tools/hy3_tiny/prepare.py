"""Prepares everything that travels to the training machine: the tokenizer, token streams and words.

    python -m tools.hy3_tiny.prepare DOWNLOADS DATA [--held-out]

DATA gets tokenizer.json, {code,text}_train.xz (little-endian uint16, every document as BOS ids EOS), words.txt and
held_out/{code,text}.xz (documents as text). With --held-out only the last, from the packages that hold any.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.hy3_tiny import tokenizer as bpe
from tools.hy3_tiny.corpus import Document, documents, load_sources

TOKENIZER_SAMPLE = 25_000_000  # bytes of training documents that the BPE is trained on
SEED = 3


def read_all(downloads: Path, held_out: bool = False) -> list[Document]:
    """Every document of sources.toml, deduplicated by content; held-out packages first, so that no copy trains.

    With `held_out` only held-out documents, from the packages that hold any.
    """
    seen: set[bytes] = set()
    sources = sorted(load_sources(), key=lambda s: s.split != "held_out")
    if held_out:
        sources = [s for s in sources if s.split != "train"]
    found = [d for s in sources for d in documents(s, downloads, seen)]
    return [d for d in found if d.split == "held_out"] if held_out else found


def write_held_out(docs: list[Document], folder: Path) -> None:
    """held_out/{code,text}.xz: JSON lists of source, path and text."""
    (folder / "held_out").mkdir(parents=True, exist_ok=True)
    for kind in ("code", "text"):
        chosen = [d for d in docs if d.kind == kind and d.split == "held_out"]
        body = json.dumps([{"source": d.source, "path": d.path, "text": d.text} for d in chosen]).encode()
        (folder / "held_out" / f"{kind}.xz").write_bytes(lzma.compress(body, preset=6))


def encode(tokenizer: Tokenizer, docs: list[Document]) -> np.ndarray:
    """BOS ids EOS of every document, one uint16 array."""
    bos, eos = tokenizer.token_to_id(bpe.BOS), tokenizer.token_to_id(bpe.EOS)
    parts = []
    for start in range(0, len(docs), 64):
        texts = [d.text for d in docs[start : start + 64]]
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        parts += [np.asarray([bos, *e.ids, eos], dtype=np.uint16) for e in encoded]
    return np.concatenate(parts)


def words_of(docs: list[Document]) -> list[str]:
    """Plain lower-case words of 4 to 9 letters that the text uses often, for the keys of generated tasks."""
    counts: dict[str, int] = {}
    for d in docs:
        if d.kind == "text":
            for w in re.findall(r"\b[a-z]{4,9}\b", d.text):
                counts[w] = counts.get(w, 0) + 1
    return sorted(sorted(counts, key=lambda w: (-counts[w], w))[200:5200])


def train_tokenizer(docs: list[Document]) -> Tokenizer:
    """The BPE of a sample of training documents: all text and three in ten code files, until the sample is full."""
    sample, size = [], 0
    for d in docs:
        if d.kind == "text" or random.Random(d.path).random() < 0.3:
            sample.append(d.text)
            size += len(d.text)
        if size > TOKENIZER_SAMPLE:
            break
    return bpe.train(sample)


def write_streams(tokenizer: Tokenizer, docs: list[Document], folder: Path) -> list[dict[str, int | str]]:
    """{code,text}_train.xz, both at once; documents, bytes and tokens of each."""

    def write(kind: str) -> dict[str, int | str]:
        chosen = [d for d in docs if d.kind == kind]
        ids = encode(tokenizer, chosen)
        (folder / f"{kind}_train.xz").write_bytes(lzma.compress(ids.astype("<u2").tobytes(), preset=4))
        size = sum(len(d.text.encode()) for d in chosen)
        return {"stream": f"{kind}_train", "documents": len(chosen), "bytes": size, "tokens": len(ids)}

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(write, ("code", "text")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("downloads", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--held-out", action="store_true", help="only what an evaluation needs")
    args = parser.parse_args()
    docs = read_all(args.downloads, args.held_out)
    write_held_out(docs, args.data)
    if args.held_out:
        return
    random.Random(SEED).shuffle(docs)
    train_docs = [d for d in docs if d.split == "train"]
    tokenizer = train_tokenizer(train_docs)
    tokenizer.save(str(args.data / "tokenizer.json"))
    (args.data / "words.txt").write_text("\n".join(words_of(train_docs)) + "\n")
    summary = write_streams(tokenizer, train_docs, args.data)
    (args.data / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
