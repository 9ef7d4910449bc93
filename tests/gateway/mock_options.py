"""What a mock engine can be told: what it says, how long it takes, who it claims to be."""

from __future__ import annotations

import argparse
import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.block_hash import BLOCK_TOKENS
from katydid_runtime.tls import ServerTls
from katydid_runtime.tokenizer_digest import tokenizer_digest

from tests.gateway.clock_words import ClockWords

Script = Callable[[array, pb.SamplingParams, int], list[int]]


def cycling(prompt: array, sampling: pb.SamplingParams, choice: int) -> list[int]:
    """The default script: the prompt's ids again and again, from another start for every choice."""
    return [prompt[(choice + place) % len(prompt)] for place in range(sampling.max_tokens)]


@dataclass
class MockOptions:
    """How the engine behaves; may be changed while it runs. With `refusal` every request ends with that error.

    While `deaf`, requests are recorded and forgotten, as if the stream had broken under way.
    """

    script: Script = cycling
    model: str = "mock"
    role: pb.Role = pb.ROLE_BOTH
    identity: bytes = hashlib.sha256(b"mock model").digest()
    tokenizer_digest: bytes = b""
    golden_digest: bytes = b""
    kv_cache_attached: bool = False
    kvcache_instance: str = ""
    vocab_size: int = 1000
    max_model_tokens: int = 8192
    max_choices: int = 8
    max_logprobs: int = 20
    dp_ranks: int = 1
    pages: int = 4096
    eos: int = 0
    queue_s: float = 0.0
    lookup_s: float = 0.0
    fetch_s: float = 0.0
    prefill_s: float = 0.0
    handover_s: float = 0.0
    step_s: float = 0.0
    tokens_per_step: int = 1
    # Tokens of a prompt whose log probabilities come together, as of one chunk of a prefill.
    prompt_part: int = 2**20
    reattach_window_s: float = 5.0
    block_tokens: int = BLOCK_TOKENS
    hash_fingerprint: bytes | None = None
    grammar_kinds: tuple[str, ...] = ()
    # Ids of the spans it reports, so that links can be checked.
    span_ids: dict[str, bytes] = field(default_factory=dict)
    refusal: pb.RequestError | None = None
    deaf: bool = False
    tls: ServerTls | None = None
    # Instead of the script's tokens, ones that say when they were made.
    clock: ClockWords | None = None


def command_line(description: str | None) -> tuple[str, MockOptions]:
    """The address to listen on, and the options, of a mock engine in a process of its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--model", required=True, help="folder whose tokenizer the gateway uses")
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--prefill-ms", type=float, default=0.0)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--max-model-tokens", type=int, default=8192)
    parser.add_argument("--pages", type=int, default=4096)
    parser.add_argument("--clock", metavar="FOLDER", help="tokens say when they were made, in words of this model")
    arguments = parser.parse_args()
    options = MockOptions(
        tokenizer_digest=tokenizer_digest(arguments.model),
        step_s=arguments.step_ms / 1e3,
        tokens_per_step=arguments.tokens_per_step,
        prefill_s=arguments.prefill_ms / 1e3,
        vocab_size=arguments.vocab_size,
        max_model_tokens=arguments.max_model_tokens,
        pages=arguments.pages,
        clock=ClockWords(arguments.clock) if arguments.clock else None,
    )
    return arguments.listen, options
