"""How many KV pages a rank gets: as many as it was told, or as many as its memory holds."""

from __future__ import annotations

import torch
from katydid_runtime.errors import SettingsError

from katydid_engine.collectives import Collectives
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.request import pages_for
from katydid_engine.worker_config import WorkerConfig

__all__ = ["count_pages"]


def count_pages(model: DecoderLM, config: WorkerConfig, collectives: Collectives, *, reserved_bytes: int = 0) -> int:
    """The same number on every rank of a group. Called after the weights are loaded, before pages are allocated.

    Args:
        reserved_bytes: of a GPU, that steps will take beside what is taken now.

    Raises:
        SettingsError: the memory does not hold one page.
    """
    if config.num_pages is not None:
        return config.num_pages
    page_bytes = model.new_kv_cache(1).bytes_per_page
    if model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        budget = int(total * config.gpu_memory_share) - (total - free) - reserved_bytes
    else:
        budget = config.kv_memory_bytes
    pages = budget // page_bytes
    if collectives.size > 1:
        pages = int(collectives.all_gather(torch.tensor([pages], device=model.device), 0).min())
    if pages < 1:
        raise SettingsError(
            f"no memory for KV pages: a page has {page_bytes} bytes, {max(budget, 0)} bytes are left for them",
            field="gpu_memory_share" if model.device.type == "cuda" else "kv_memory_mib",
        )
    # On a host a cache larger than every sequence at its longest would only cost memory.
    enough = config.max_sequences * pages_for(min(config.max_model_tokens, model.config.max_positions))
    return pages if model.device.type == "cuda" else min(pages, 4 * enough)
