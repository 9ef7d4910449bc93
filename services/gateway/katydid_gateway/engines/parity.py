"""Whether an engine reads tokens as this gateway writes them; what differs would be wrong text or lost cache hits.

Both are silent: so block hashes, tokenizer files and the ids of golden texts are compared before the first request.
"""

from __future__ import annotations

import asyncio

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.block_hash import BLOCK_TOKENS, fingerprint
from katydid_runtime.errors import IdentityMismatchError
from katydid_runtime.golden_prompts import GOLDEN_TEXTS, golden_digest

from katydid_gateway.requests import TextPrompt
from katydid_gateway.text.model_text import ModelText

__all__ = ["Parity", "check_parity"]


class Parity:
    """What this gateway does with text. Golden texts go the way of every prompt, through all caches of ids."""

    def __init__(self, text: ModelText) -> None:
        self._text = text
        self._golden: asyncio.Task[bytes] | None = None

    async def check(self, engine: str, description: pb.DescribeResponse) -> None:
        """Raises IdentityMismatchError naming what the engine and this gateway do differently."""
        if self._golden is None:
            self._golden = asyncio.create_task(self._digest())
        check_parity(engine, description, self._text.digest, await asyncio.shield(self._golden))

    async def _digest(self) -> bytes:
        return golden_digest(
            [(await self._text.encode(TextPrompt(text, special_tokens=False))).ids for text in GOLDEN_TEXTS]
        )


def check_parity(engine: str, description: pb.DescribeResponse, tokenizer_digest: bytes, golden: bytes) -> None:
    """Raises IdentityMismatchError naming what the engine and this gateway do differently."""
    if description.block_tokens != BLOCK_TOKENS:
        raise IdentityMismatchError(
            f"engine {engine} cuts blocks of {description.block_tokens} tokens, this gateway of {BLOCK_TOKENS}",
            field="block_tokens",
        )
    if description.hash_fingerprint != fingerprint(description.identity):
        raise IdentityMismatchError(
            f"engine {engine} hashes blocks in another way than this gateway", field="hash_fingerprint"
        )
    if description.tokenizer_digest != tokenizer_digest:
        raise IdentityMismatchError(
            f"engine {engine} was started with another tokenizer or chat template than this gateway",
            field="tokenizer_digest",
        )
    if description.golden_digest and description.golden_digest != golden:
        raise IdentityMismatchError(
            f"engine {engine} cuts golden texts into other tokens than this gateway, with the same tokenizer file",
            field="golden_digest",
        )
