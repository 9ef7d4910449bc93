"""hy3-tiny's own byte-level BPE of 4,096 tokens with Hy3's special tokens; digits are always single tokens."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
BOS = "<｜hy_begin▁of▁sentence｜>"
EOS = "<｜hy_eos｜>"
PAD = "<｜hy_pad｜>"
USER = "<｜hy_User｜>"
ASSISTANT = "<｜hy_Assistant｜>"
SYSTEM_END = "<｜hy_place▁holder▁no▁3｜>"
REASONING_MODE = "<｜reasoning_mode｜>"
MARKERS = (
    "<think>",
    "</think>",
    "<tool_calls>",
    "</tool_calls>",
    "<tool_call>",
    "</tool_call>",
    "<tool_sep>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_responses>",
    "</tool_responses>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
)
SPECIAL = (BOS, EOS, PAD, USER, ASSISTANT, SYSTEM_END, REASONING_MODE)
# A line break swallows the indentation after it; a word takes one space or underscores before it; digits stand alone.
PIECES = r"\n+[ \t]*|\p{N}| ?_*\p{L}+| ?[^\s\p{L}\p{N}]+|[ \t]+(?!\S)|\s"


def train(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A tokenizer of exactly `vocabulary` tokens, special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in SPECIAL]
    # Markers stay visible to parsers that detokenise with skip_special_tokens, as in Hy3's own tokenizer.
    special += [AddedToken(t, special=False, normalized=False) for t in MARKERS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, wanted {vocabulary}: it is too small")
    return tokenizer
