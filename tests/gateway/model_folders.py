"""Model folders with text and no weights: tiny byte-level tokenizers with a ChatML-like and a Hy3-like template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Grüße aus Köln, 東京から, مرحبا, 🦗 katydid 🦗🦗",
    'User: hello there\nAssistant: hi, how can I help? {"city": "Paris", "days": 3}',
] * 4

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

HY3 = (
    "{{ '<｜hy_begin▁of▁sentence｜>' }}"
    "{% if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '<｜hy_User｜>' + message.content }}"
    "{% elif message.role == 'assistant' %}{{ '<｜hy_Assistant｜>' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '<tool_sep>' }}"
    "{% for key, value in call.function.arguments | items %}{{ '<arg_key>' + key + '</arg_key>' }}"
    "{{ '<arg_value>' + (value if value is string else value | tojson) + '</arg_value>' }}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜hy_Assistant｜>' }}"
    "{% if reasoning_effort | default('no_think') in ['low', 'high'] %}{{ '<think>' }}{% endif %}{% endif %}"
)
HY3_MARKERS = (
    "<think>", "</think>", "<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tools>", "</tools>",
)  # fmt: skip


def tiny_tokenizer(special: list[str], visible: tuple[str, ...] = (), vocabulary: int = 600) -> Tokenizer:
    """Byte-level BPE; `special` tokens are left out of text, `visible` ones are single tokens that stay in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True, normalized=False) for token in special]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in visible])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, template: str, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
    return folder


def chatml_folder(folder: Path) -> Path:
    """Special tokens: <|end|> (0), <|im_start|> (1), <|im_end|> (2); texts begin with <|end|> as BOS."""
    tokenizer = tiny_tokenizer(["<|end|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    return write_folder(folder, tokenizer, CHATML, {"eos_token": "<|end|>", "bos_token": {"content": "<|end|>"}})


def hy3_folder(folder: Path) -> Path:
    """Hy3's markers, as special tokens too, and a template that shows tools, calls and reasoning as Hy3's does."""
    special = ["<｜hy_eos｜>", "<｜hy_begin▁of▁sentence｜>", "<｜hy_User｜>", "<｜hy_Assistant｜>", *HY3_MARKERS]
    tokenizer = tiny_tokenizer(special)
    return write_folder(folder, tokenizer, HY3, {"eos_token": "<｜hy_eos｜>"})
