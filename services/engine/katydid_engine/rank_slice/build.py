"""Builds one rank of a plan without its peers and without a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from katydid_runtime.errors import SettingsError

from katydid_engine.kv_cache import KvCache
from katydid_engine.loader import build_model
from katydid_engine.model_config import ModelConfig
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.parallel import ParallelPlan
from katydid_engine.quantization import Scheme
from katydid_engine.rank_slice.absent_copies import AbsentCopies
from katydid_engine.rank_slice.absent_peers import AbsentPeers
from katydid_engine.rank_slice.absent_ranks import AbsentRanks, ExpertMessages
from katydid_engine.rank_slice.emulated_link import EmulatedLink
from katydid_engine.rank_slice.skewed_routing import SkewedRouting
from katydid_engine.rank_slice.synthetic_weights import DEVIATION, SyntheticWeights

__all__ = ["DTYPES", "RankSlice", "SliceOptions", "build_slice", "fill_pages"]

DTYPES = {"bf16": Scheme.NONE, "fp8": Scheme.FP8, "w4a8": Scheme.W4A8}
_KV = {"bf16": "auto", "fp8": "fp8"}
_FILL = 1 << 24
_POOL, _HOST_POOL = 1 << 26, 1 << 18


@dataclass(frozen=True, slots=True)
class SliceOptions:
    """What is built.

    Attributes:
        rank: of the plan's.
        dtype: of the weights: a key of ``DTYPES``.
        kv: of the pages: "bf16" (on a CPU: fp32) or "fp8".
        skewed: whether experts are chosen as unevenly as hy3-tiny's; otherwise evenly.
        mtp: whether the model's draft layers are built.
        micro_batches: parts of a batch where ranks wait for each other.
        most_tokens: of a step, where peers' memory is made for them.
        links: bytes a second of a link that what is sent beside the step goes over, emulated; None: it takes no time.
        far: another GPU whose memory that link leads to.

    Raises:
        SettingsError: a rank that the plan does not have, pipeline stages, or a dtype that there is not.
    """

    config: ModelConfig
    plan: ParallelPlan
    device: torch.device
    rank: int = 0
    dtype: str = "fp8"
    kv: str = "fp8"
    skewed: bool = False
    mtp: bool = False
    micro_batches: int = 1
    most_tokens: int = 32_768
    links: float | None = None
    far: torch.device | None = None

    def __post_init__(self) -> None:
        for field, value, allowed in (("dtype", self.dtype, DTYPES), ("kv", self.kv, _KV)):
            if value not in allowed:
                raise _wrong(field, value, ", ".join(allowed))
        if not 0 <= self.rank < self.plan.world_size:
            raise _wrong("rank", self.rank, f"0 to {self.plan.world_size - 1}, the ranks of {self.plan}")
        if self.plan.pp > 1:
            raise _wrong("plan", str(self.plan), "no pp: a stage computes what the one before it sends")


@dataclass(frozen=True, slots=True)
class RankSlice:
    """A model of one rank, and the groups that it believes to be in.

    Attributes:
        experts: the ranks that hold whole experts between them; the TP group where they are the same.
        link: what is sent beside a step goes over, where one is emulated.
    """

    options: SliceOptions
    model: DecoderLM
    tensor: AbsentRanks
    experts: AbsentRanks
    link: EmulatedLink | None = None

    @property
    def groups(self) -> tuple[AbsentRanks, ...]:
        return (self.tensor,) if self.experts is self.tensor else (self.tensor, self.experts)

    def token_ids(self, count: int, seed: int = 0) -> list[int]:
        """Ids that this rank has the embeddings of: the others' are zeros here, and all of them would choose alike."""
        part = -(-self.options.config.vocab_size // self.options.plan.tp)
        first = part * self.options.plan.place(self.options.rank).tp
        last = min(first + part, self.options.config.vocab_size)
        generator = torch.Generator().manual_seed(seed)
        ids: list[int] = torch.randint(first, last, (count,), generator=generator).tolist()
        return ids


def build_slice(options: SliceOptions) -> RankSlice:
    """Raises SettingsError where the plan does not fit the model."""
    config, plan = options.config, options.plan
    if not options.mtp:
        config = replace(config, num_mtp_layers=0)
    scheme = DTYPES[options.dtype]
    dtype = torch.bfloat16 if options.device.type == "cuda" else torch.float32
    bias = None
    if options.skewed and config.moe is not None:
        bias = SkewedRouting(config.moe.top_k, DEVIATION * config.hidden_size**0.5)
    pool = _POOL if options.device.type == "cuda" else _HOST_POOL
    weights = SyntheticWeights(options.device, dtype, scheme, pool=pool, bias=bias)
    config = replace(config, quantization=weights.quantization)
    tensor = AbsentRanks(plan.place(options.rank).tp, plan.tp)
    experts = tensor
    if plan.ep > 1 and plan.dp > 1:
        experts = AbsentRanks(options.rank, plan.ep) if plan.shares_experts else tensor
    peers = copies = None
    link = None
    if options.links is not None and options.device.type == "cuda":
        link = EmulatedLink(options.device, options.links, options.far)
    tensor.link = experts.link = link
    if plan.sp and options.device.type == "cuda" and not plan.tp & (plan.tp - 1) and config.hidden_size % 16 == 0:
        most = -(-options.most_tokens // plan.tp) * plan.tp
        peers = AbsentPeers(tensor, config.hidden_size, most, options.device)
        if plan.fp8_transfers and options.micro_batches > 1:
            told = 2 * (config.moe.top_k + 1) if config.moe is not None else 0
            copies = AbsentCopies(
                tensor, config.hidden_size, tokens=most // 2, told=told, device=options.device, link=link
            )
    model = build_model(
        config,
        weights,
        device=options.device,
        dtype=dtype,
        plan=plan,
        collectives=tensor,
        experts=experts if plan.ep > 1 else None,
        micro_batches=options.micro_batches,
        peers=peers,
        copies=copies,
        kv_cache_dtype=_KV[options.kv],
    )
    if model.dispatched:
        assert config.moe is not None
        exchange = model.dispatched[0].exchange
        slots = (config.moe.num_experts + plan.redundant_experts) // plan.ep
        top_k = config.moe.top_k
        experts.messages = ExpertMessages(exchange.row_bytes + 8 * top_k, exchange.row_bytes, top_k, slots)
    return RankSlice(options, model, tensor, experts, link)


def fill_pages(cache: KvCache) -> None:
    """Numbers of deviation one in every page: attention over zeros would be no measurement."""
    first = cache.k_pages[0]
    generator = torch.Generator(first.device).manual_seed(3)
    drawn = torch.empty(min(_FILL, first.numel()), device=first.device, dtype=torch.float32)
    values = drawn.normal_(generator=generator).to(first.dtype)
    for pages in (*cache.k_pages, *cache.v_pages):
        flat = pages.view(-1)
        for start in range(0, len(flat), len(values)):
            part = flat[start : start + len(values)]
            part.copy_(values[: len(part)])


def _wrong(field: str, value: object, allowed: str) -> SettingsError:
    return SettingsError(
        f"rank slice: {field}={value!r}, expected {allowed}", field=field, value=value, allowed=allowed
    )
