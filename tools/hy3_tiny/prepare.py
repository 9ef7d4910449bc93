"""Prepares everything that travels to the training machine: the tokenizer, four token streams and word lists.

    python -m tools.hy3_tiny.prepare DOWNLOADS DATA

DATA gets tokenizer.json, {code,text}_{train,held_out}.xz (little-endian uint16, every document as BOS ids EOS),
held_out/{code,text}.xz (the same documents as text) and words.txt.
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


def read_all(downloads: Path) -> list[Document]:
    """Every document of sources.toml, deduplicated by content; held-out packages first, so that no copy trains."""
    seen: set[bytes] = set()
    sources = sorted(load_sources(), key=lambda s: s.split != "held_out")
    return [d for s in sources for d in documents(s, downloads, seen)]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("downloads", type=Path)
    parser.add_argument("data", type=Path)
    args = parser.parse_args()
    (args.data / "held_out").mkdir(parents=True, exist_ok=True)
    docs = read_all(args.downloads)
    random.Random(SEED).shuffle(docs)
    train_docs = [d for d in docs if d.split == "train"]
    sample, size = [], 0
    for d in train_docs:
        if d.kind == "text" or random.Random(d.path).random() < 0.3:
            sample.append(d.text)
            size += len(d.text)
        if size > TOKENIZER_SAMPLE:
            break
    tokenizer = bpe.train(sample)
    tokenizer.save(str(args.data / "tokenizer.json"))
    (args.data / "words.txt").write_text("\n".join(words_of(train_docs)) + "\n")

    def write(job: tuple[str, str]) -> dict[str, int | str]:
        kind, split = job
        chosen = [d for d in docs if d.kind == kind and d.split == split]
        ids = encode(tokenizer, chosen)
        (args.data / f"{kind}_{split}.xz").write_bytes(lzma.compress(ids.astype("<u2").tobytes(), preset=4))
        if split == "held_out":
            body = json.dumps([{"source": d.source, "path": d.path, "text": d.text} for d in chosen]).encode()
            (args.data / "held_out" / f"{kind}.xz").write_bytes(lzma.compress(body, preset=6))
        return {
            "stream": f"{kind}_{split}",
            "documents": len(chosen),
            "bytes": sum(len(d.text.encode()) for d in chosen),
            "tokens": len(ids),
        }

    jobs = [(k, s) for s in ("train", "held_out") for k in ("code", "text")]
    with ThreadPoolExecutor(2) as pool:
        summary = list(pool.map(write, jobs))
    (args.data / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
