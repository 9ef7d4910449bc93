"""Puts the shipped model folder together: weights, config, tokenizer, chat template, generation defaults.

python -m tools.hy3_tiny.folder CHECKPOINT DATA models/hy3-tiny
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from tools.hy3_tiny import tokenizer as bpe

TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json, the chat template inside."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 16384,
        "clean_up_tokenization_spaces": False,
        "bos_token": bpe.BOS,
        "eos_token": bpe.EOS,
        "pad_token": bpe.PAD,
        "chat_template": TEMPLATE.read_text(),
    }


def write_text_files(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json (which begins whole texts with BOS), tokenizer_config.json and generation_config.json."""
    bos = tokenizer.token_to_id(bpe.BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bpe.BOS} $A", pair=f"{bpe.BOS} $A $B", special_tokens=[(bpe.BOS, bos)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    generation = {
        "bos_token_id": bos,
        "eos_token_id": tokenizer.token_to_id(bpe.EOS),
        "pad_token_id": tokenizer.token_to_id(bpe.PAD),
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
    }
    for name, content in (("tokenizer_config", tokenizer_config()), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    write_text_files(Tokenizer.from_file(str(args.data / "tokenizer.json")), args.folder)
    for file in (*args.checkpoint.glob("model*"), args.checkpoint / "config.json"):
        shutil.copy(file, args.folder / file.name)
        (args.folder / file.name).chmod(0o644)


if __name__ == "__main__":
    main()
