"""What routing and engines see of a prompt: the block hashes of its ids under its tenant's salt."""

from __future__ import annotations

import hmac
from hashlib import sha256

from katydid_runtime.block_hash import ChainKey

from katydid_gateway.chain_cache import ChainCache
from katydid_gateway.engines.fleet import Fleet
from katydid_gateway.routing.router import RoutedPrompt
from katydid_gateway.settings import GatewaySettings
from katydid_gateway.text.model_text import EncodedPrompt

__all__ = ["PromptHashes"]


class PromptHashes:
    """Hashes prompts, each beginning once."""

    def __init__(self, settings: GatewaySettings, fleet: Fleet) -> None:
        self._fleet = fleet
        self._secret = settings.cache_salt_secret
        self._public_blocks = settings.public_blocks
        self._chains = ChainCache(settings.chain_cache_bytes)

    def salt(self, tenant: str) -> bytes:
        """What is mixed into a tenant's hashes; b"" where tenants share their caches."""
        if self._secret is None or not tenant:
            return b""
        return hmac.digest(self._secret.get_secret_value().encode(), tenant.encode(), "sha256")

    def public_blocks(self, salt: bytes) -> int:
        """Leading blocks that go unsalted."""
        return self._public_blocks if salt else 0

    def routed(self, prompt: EncodedPrompt, affinity: str, salt: bytes, *, bypass: bool) -> RoutedPrompt:
        """The prompt for the router; one that bypasses caches has no hashes."""
        chain: tuple[bytes, ...] = ()
        if not bypass:
            key = ChainKey(self._fleet.identity, salt=salt, public_blocks=self.public_blocks(salt))
            chain = self._chains.chain(prompt.ids, key, prompt.known, prompt.prefix)
        digest = b"" if chain else sha256(prompt.ids).digest()
        return RoutedPrompt(chain, prompt.tokens, affinity, digest)
