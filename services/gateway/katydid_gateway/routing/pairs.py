"""Prompts computed on one engine and continued on another: what the second one needs to go on.

The first engine writes the prompt's blocks to the cache service as it computes them; the second fetches what it does
not hold, from its own host's instance where both share one and over the network where not, while later ones are still
computed, and computes the tail of less than a block. Without a cache service between them it computes the prompt again.
"""

from __future__ import annotations

from collections.abc import Mapping

from katydid_runtime.block_hash import BLOCK_TOKENS

from katydid_gateway.routing.cost import DEFAULT_PREFILL_SPEED, Prediction, TierSpeeds, predict
from katydid_gateway.routing.load import EngineState, RankState
from katydid_gateway.routing.tier_index import CacheTier, TierRun

__all__ = ["COMPUTES_PROMPTS", "CONTINUES", "after_hand_off", "last_blocks_s", "worth_following"]

COMPUTES_PROMPTS: Mapping[str, str] = {"decode": "continues prompts only"}
"""Why an engine of a role gets no new prompt."""
CONTINUES: Mapping[str, str] = {"prefill": "computes prompts only"}
"""Why an engine of a role continues none."""

# So many blocks are one chunk of a prefill on a GPU: when the first of them can be fetched the last are computed.
_FOLLOWED_BLOCKS = 128
# The last blocks are on their way to the cache when the first token is on its way to the gateway.
_LAST_BLOCKS_S = 2.0


def after_hand_off(
    giver: EngineState,
    taker: EngineState,
    rank: RankState,
    prompt_tokens: int,
    prompt_blocks: int,
    device_blocks: int,
    speeds: TierSpeeds,
    late_s: float = 0.0,
) -> Prediction:
    """Terms of `taker`'s next token, once `giver` has computed a prompt of which the taker holds `device_blocks`."""
    missing = prompt_blocks - device_blocks
    runs = []
    if missing > 0 and giver.kv_cache_attached:
        shared = giver.near != taker.near
        runs.append(TierRun(CacheTier.SHARED if shared else CacheTier.MEMORY, missing))
    return predict(taker, rank, prompt_tokens, device_blocks, runs, speeds, late_s)


def worth_following(giver: EngineState, taker: EngineState, prompt_blocks: int, device_blocks: int) -> bool:
    """Whether `taker` should fetch the prompt's blocks while `giver` computes them."""
    attached = giver.kv_cache_attached and taker.kv_cache_attached
    return attached and prompt_blocks - device_blocks > _FOLLOWED_BLOCKS


def last_blocks_s(giver: EngineState, rank: RankState, prompt_tokens: int, device_blocks: int) -> float:
    """How long a taker's rank waits for blocks that `giver` has computed and the cache service does not have yet: no
    longer than it would compute them."""
    if not giver.kv_cache_attached:
        return 0.0
    missing = max(0, prompt_tokens - device_blocks * BLOCK_TOKENS)
    return min(_LAST_BLOCKS_S, missing / (rank.report.prefill_speed or DEFAULT_PREFILL_SPEED))
