"""Prompts computed on one engine and continued on another: what the second one needs to go on.

The first engine writes the prompt's blocks to the cache service as it computes them; the second fetches what it does
not hold, from its own host's instance where both share one and over the network where not, and computes the tail of
less than a block. Without a cache service between them it computes the prompt again.
"""

from __future__ import annotations

from collections.abc import Mapping

from katydid_gateway.routing.cost import Prediction, TierSpeeds, predict
from katydid_gateway.routing.load import EngineState, RankState
from katydid_gateway.routing.tier_index import CacheTier, TierRun

__all__ = ["COMPUTES_PROMPTS", "CONTINUES", "after_hand_off"]

COMPUTES_PROMPTS: Mapping[str, str] = {"decode": "continues prompts only"}
"""Why an engine of a role gets no new prompt."""
CONTINUES: Mapping[str, str] = {"prefill": "computes prompts only"}
"""Why an engine of a role continues none."""


def after_hand_off(
    giver: EngineState,
    taker: EngineState,
    rank: RankState,
    prompt_tokens: int,
    prompt_blocks: int,
    device_blocks: int,
    speeds: TierSpeeds,
) -> Prediction:
    """Terms of `taker`'s next token, once `giver` has computed a prompt of which the taker holds `device_blocks`."""
    missing = prompt_blocks - device_blocks
    runs = []
    if missing > 0 and giver.kv_cache_attached:
        shared = giver.near != taker.near
        runs.append(TierRun(CacheTier.SHARED if shared else CacheTier.MEMORY, missing))
    return predict(taker, rank, prompt_tokens, device_blocks, runs, speeds)
