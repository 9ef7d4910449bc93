"""What the n-gram baseline learns from is byte for byte the text that the tokens stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.quality.baseline import stream_text, token_bytes


def test_a_stream_gives_back_the_bytes_of_its_text() -> None:
    tokenizer = Tokenizer.from_file(str(Path(__file__).parents[2] / "models" / "hy3-tiny" / "tokenizer.json"))
    text = "def größer(x):\n\treturn '你好 🎉'\n\n\n    # 12\r\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert (
        stream_text(np.asarray([0, *ids, 1], dtype=np.uint16), token_bytes(tokenizer)) == b"\n" + text.encode() + b"\n"
    )
