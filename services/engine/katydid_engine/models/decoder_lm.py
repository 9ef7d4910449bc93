"""A decoder-only language model on one rank: embedding, layers, final norm, head. What the runner calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from katydid_engine.attention_plan import MAX_Q_LEN, AttentionPlanner
from katydid_engine.fixed_prefill import FixedPrefill
from katydid_engine.fixed_room import fixed_room
from katydid_engine.forward_batch import ForwardBatch
from katydid_engine.kv_cache import KvCache
from katydid_engine.layers.by_rows_exchange import ByRowsExchange
from katydid_engine.layers.decoder import DecoderLayer, FeedForward
from katydid_engine.layers.dispatched_moe import DispatchedMoe
from katydid_engine.layers.embedding import Embedding, LmHead
from katydid_engine.layers.exchange import BlockOutput, Exchange
from katydid_engine.layers.few_rows_exchange import FewRowsExchange
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.layers.part_exchange import CopiedPartExchange, PartExchange
from katydid_engine.layers.peer_exchange import PeerExchange
from katydid_engine.layers.rotary import rotary_table
from katydid_engine.layers.steps import Steps, finish, interleave
from katydid_engine.models.rank_context import RankContext
from katydid_engine.parted_vocabulary import likeliest
from katydid_engine.sparse_prefill import SparsePrefill
from katydid_engine.weights import Weights

__all__ = ["DecoderLM", "FeedForward", "FeedForwardBuilder"]

FeedForwardBuilder = Callable[[RankContext, Weights, int], FeedForward | DispatchedMoe]
"""Builds the feed-forward block of layer ``index`` from that layer's scope: where architectures differ."""


class DecoderLM:
    """One rank's share of a model.

    Attributes:
        config: of the whole model, not of this rank's share.
        device: of weights, pages and batches.
        dtype: of hidden states.
        head: on a pipeline's first stage.
        before_pass: None, or called at the beginning of every ``forward`` with 0, of every ``draft`` with 1 + depth,
            with the rows of this rank and the passes of the draft layer that it would have behind it; returns the most
            rows of any rank that computes with this one, and the passes behind it that all have.
        agreed_passes: for which it is not called any more. What carries passes out without ``forward`` and ``draft``,
            a graph, takes them off.
    """

    def __init__(self, context: RankContext, weights: Weights, feed_forward: FeedForwardBuilder) -> None:
        config = context.config
        self.config = config
        self.device = weights.device
        self.dtype = weights.dtype
        self.before_pass: Callable[[int, int, int], tuple[int, int]] | None = None
        self.agreed_passes = 0
        self._context = context
        self._stage = context.stage
        self._exchange = _exchange(context)
        self._part_exchanges = _part_exchanges(context, self._exchange)
        tp = context.plan.tp
        self._planner = AttentionPlanner(
            config.num_heads // tp, context.plan.kv_heads(config.num_kv_heads), config.head_dim, weights.device
        )
        # The last token's drafts lie behind the last position.
        self._table = rotary_table(config.rope, config.head_dim, config.max_positions + MAX_Q_LEN, weights.device)
        self._layers = [
            self._decoder_layer(weights.scope(f"model.layers.{index}"), index, feed_forward)
            for index in self._stage.layers(config.num_layers)
        ]
        self._passed: Sequence[int] = range(len(self._layers))
        if self._stage.first:
            self._embedding = Embedding(weights.scope("model.embed_tokens"), config.vocab_size, config.hidden_size)
            self.head = LmHead(
                weights.scope("lm_head"),
                context.collectives,
                config.vocab_size,
                config.hidden_size,
                tied=self._embedding if config.tie_embeddings else None,
                fp32=config.lm_head_fp32,
            )
        if self._stage.last:
            self._norm = RmsNorm(weights.scope("model.norm"), config.hidden_size, config.rms_norm_eps)

    @property
    def halves_in_graphs(self) -> bool:
        """Whether long passes are computed in two parts, and a graph can hold what is sent between them."""
        return any(isinstance(way, CopiedPartExchange) for way in self._part_exchanges)

    @property
    def has_head(self) -> bool:
        """Whether ``logits`` can be asked here: only of a pipeline's first stage."""
        return self._stage.first

    @property
    def first_kv_head(self) -> int:
        """Number of this rank's first KV head among the model's."""
        return self._context.plan.first_kv_head(self.config.num_kv_heads, self._context.collectives.rank)

    @property
    def sums_kv_heads(self) -> bool:
        """Whether this rank is the first of those that hold its KV heads."""
        rank, plan = self._context.collectives.rank, self._context.plan
        return rank == 0 or self.first_kv_head != plan.first_kv_head(self.config.num_kv_heads, rank - 1)

    @property
    def dispatched(self) -> list[DispatchedMoe]:
        """The blocks that send rows to experts on other ranks, in order of layers."""
        blocks = (layer.feed_forward for layer in self._every_layer())
        return [block for block in blocks if isinstance(block, DispatchedMoe)]

    def use_sparse_prefill(self, options: SparsePrefill) -> None:
        """From now on prompts that batches say may be computed sparsely are, if they are long enough."""
        self._planner.sparse_prefill = options
        for index, layer in zip(self._stage.layers(self.config.num_layers), self._layers, strict=True):
            if index >= options.dense_layers:
                layer.attend_sparsely()

    @property
    def sparse_prefill(self) -> SparsePrefill | None:
        """How long prompts are computed that may be sparse."""
        return self._planner.sparse_prefill

    def computes_sparsely(self, prompt: int) -> bool:
        """Whether a prompt of so many tokens is, if it may be."""
        options = self.sparse_prefill
        return options is not None and prompt >= options.min_tokens

    def expect(self, prompt: int) -> None:
        """A prompt of so many tokens comes that may be sparse: what takes a while is not left to its first step."""
        if self.computes_sparsely(prompt):
            self._planner.expect(prompt)

    def fixed_prefill(self, chunk: int, longest: int, *, sparse: bool) -> FixedPrefill:
        """As `AttentionPlanner.fixed_prefill`."""
        return self._planner.fixed_prefill(chunk, longest, sparse=sparse)

    def new_kv_cache(self, num_pages: int) -> KvCache:
        """Zeroed pages for this rank's KV heads, every layer (an MTP layer's last)."""
        return KvCache.allocate(
            num_layers=len(self._layers) + (self.config.num_mtp_layers if self._stage.first else 0),
            num_pages=num_pages,
            num_kv_heads=self._context.plan.kv_heads(self.config.num_kv_heads),
            head_dim=self.config.head_dim,
            dtype=self._context.kv_dtype,
            device=self.device,
        )

    def new_decode_plan(self) -> Tensor | None:
        """Memory for what ``planned`` makes; None where decodes need no plan."""
        return self._planner.new_decode_plan()

    def planned(self, batch: ForwardBatch, decode: Tensor | None) -> ForwardBatch:
        """The batch with attention's part worked out, its decodes' in memory of ``new_decode_plan``: several passes
        over it, of draft layers too, need that once."""
        return self._planner.planned(batch, decode)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> Tensor:
        """Writes the batch's K and V into its pages and returns hidden states ``[T, hidden]`` after the final norm.

        On a pipeline's later stages what is returned is not the model's.
        """
        self._agree(0, batch)
        if self._part_exchanges and batch.num_tokens >= self._context.halved_from and batch.halvable:
            halves = zip(batch.halves(), self._part_exchanges, strict=True)
            return torch.cat(interleave([self._embed_and_pass(half, kv_cache, way) for half, way in halves]))
        parts = batch.split(1 if self._part_exchanges else self._context.micro_batches)
        if self._stage.count > 1:
            return self._pipelined(parts, kv_cache)
        works = [self._embed_and_pass(part, kv_cache) for part in parts]
        if self._context.dispatches:
            # As many works on every rank, however many sequences each has.
            works += [self._nothing() for _ in range(self._context.micro_batches - len(parts))]
        return torch.cat(interleave(works)) if len(works) > 1 else finish(works[0])

    @torch.inference_mode()
    def take_part(self, kind: int = 0, most: int | None = None, behind: int = 0) -> None:  # noqa: ARG002 - one kind
        """What this rank owes the others in a pass for which it has no tokens itself, of the kind that ``before_pass``
        names, in which no rank has more than ``most`` rows, and in ``behind`` passes of the draft layer after it."""
        if most is not None:
            self.exchange_rows(most)
        interleave([self._nothing() for _ in range(self._context.micro_batches)])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits ``[rows, vocab]`` of hidden rows ``[rows, hidden]`` (pick the rows that are sampled first)."""
        return self.head(hidden)

    @torch.inference_mode()
    def likeliest(self, hidden: Tensor) -> Tensor:
        """The token of each row's largest logit, int32 ``[rows]``, of hidden rows ``[rows, hidden]``."""
        return likeliest(self.head, self._context.collectives, hidden)

    def rows_at_once(self, decodes: int, width: int, drafts: int = 0) -> int:
        """Rows of the largest part of a step of so many decodes: as many take room on their way at once. Where drafts
        are verified or made it is one part: a draft layer's passes are."""
        parts = 1 if width > 1 or drafts or self._part_exchanges else min(self._context.micro_batches, max(1, decodes))
        return -(-decodes // parts) * width

    def agree(self, kind: int, tokens: int, behind: int = 0) -> int | None:
        """Waits, before a pass of so many tokens, for its turn among the ranks that compute together, and settles the
        form of their exchange: also of ``behind`` passes of the draft layer after it, where all have as many. Returns
        as ``exchange_rows``."""
        assert self.before_pass is not None
        plan = self._context.plan
        most, together = self.before_pass(kind, -(-tokens // plan.tp) if plan.sp else tokens, behind)
        self.agreed_passes = 1 + together
        return self.exchange_rows(most)

    def exchange_rows(self, most: int) -> int | None:
        """From now on no rank sends more rows to experts than ``most``. Returns the room that each takes in the form
        that a graph can hold, the same for many numbers; None for the other form."""
        room = fixed_room(most)
        for block in self.dispatched:
            block.exchange.capacity = room
        return room

    @contextlib.contextmanager
    def exchange_kept(self) -> Iterator[None]:
        """Whatever ``exchange_rows`` is told within, behind it all is as before."""
        rooms = [block.exchange.capacity for block in self.dispatched]
        try:
            yield
        finally:
            for block, room in zip(self.dispatched, rooms, strict=True):
                block.exchange.capacity = room

    @contextlib.contextmanager
    def one_layer_of_a_kind(self) -> Iterator[None]:
        """Passes within go through the first layer of each kind alone: enough to load every kernel."""
        kinds = {layer.kind: index for index, layer in reversed(list(enumerate(self._layers)))}
        whole, self._passed = self._passed, sorted(kinds.values())
        try:
            yield
        finally:
            self._passed = whole

    def _agree(self, kind: int, batch: ForwardBatch) -> None:
        if self.before_pass is None:
            return
        if not self.agreed_passes:
            alone = kind == 0 and batch.num_decodes == batch.num_seqs
            self.agree(kind, self.rows_at_once(batch.num_seqs, batch.decode_q_len) if alone else batch.num_tokens)
        self.agreed_passes -= 1

    def _every_layer(self) -> list[DecoderLayer]:
        return self._layers

    def _embed_and_pass(
        self,
        batch: ForwardBatch,
        kv_cache: KvCache,
        exchange: Exchange | None = None,
    ) -> Steps[Tensor]:
        exchange = exchange or self._exchange
        batch = self._planner.planned(batch)
        x, residual = exchange.begin(self._embedding(batch.token_ids))
        x, residual = yield from self._pass(x, residual, batch, kv_cache, exchange)
        return exchange.last(self._norm, x, residual, batch.num_tokens)

    def _pass(
        self,
        x: BlockOutput,
        residual: Tensor | None,
        batch: ForwardBatch,
        kv_cache: KvCache,
        exchange: Exchange | None = None,
    ) -> Steps[tuple[BlockOutput, Tensor]]:
        for index in self._passed:
            layer = self._layers[index]
            k_pages, v_pages = kv_cache.layer(index)
            x, residual = yield from layer.steps(x, residual, self._table, batch, k_pages, v_pages, exchange)
        assert residual is not None
        return x, residual

    def _nothing(self) -> Steps[Tensor]:
        for index in self._passed:
            yield from self._layers[index].take_part()
        return torch.empty((0, self.config.hidden_size), dtype=self.dtype, device=self.device)

    def _pipelined(self, parts: list[ForwardBatch], kv_cache: KvCache) -> Tensor:
        stage, link = self._stage, self._stage.link
        assert link is not None
        results = []
        for batch in map(self._planner.planned, parts):
            shape = (batch.num_tokens, self.config.hidden_size)
            x: Tensor
            residual: Tensor | None = None
            if stage.first:
                x = self._exchange.leave(self._embedding(batch.token_ids))
            else:
                x, residual = link.receive((2, *shape), self.dtype, self.device, stage.index - 1)
            out, residual = finish(self._pass(x, residual, batch, kv_cache))
            assert isinstance(out, Tensor)
            x = out
            if stage.last:
                x, _ = self._norm.add(x, residual)
                link.send(x, 0)
            else:
                link.send(torch.stack((x, residual)), stage.index + 1)
            results.append(x)
        if stage.first:
            results = list(self._returned(parts))
        link.flush()
        return torch.cat(results)

    def _returned(self, parts: list[ForwardBatch]) -> Iterator[Tensor]:
        """Hidden states of each part, as the last stage is done with it."""
        assert self._stage.link is not None
        for batch in parts:
            shape = (batch.num_tokens, self.config.hidden_size)
            yield self._stage.link.receive(shape, self.dtype, self.device, self._stage.count - 1)

    def _embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Whole embeddings ``[T, hidden]`` of int32 ``[T]``, on every rank; zeros at position 0."""
        return self._exchange.collectives.all_reduce(self._embedding(token_ids, positions))

    def _decoder_layer(self, weights: Weights, index: int, feed_forward: FeedForwardBuilder) -> DecoderLayer:
        return DecoderLayer(
            weights,
            self.config,
            self._exchange,
            feed_forward(self._context, weights, index),
            self._context.kv_dtype,
        )


def _exchange(context: RankContext) -> Exchange:
    plan = context.plan
    if context.peers is not None:
        few = FewRowsExchange(context.collectives, context.peers)
        if plan.sp:
            many = PeerExchange(context.collectives, context.peers, fp8=plan.fp8_transfers)
            # Rows that are sent to their experts lie on one rank each.
            return many if context.dispatches else ByRowsExchange(few, many, context.peers.few_tokens)
        if not plan.sp and context.stage.count == 1:
            return few
    return Exchange(context.collectives, sequence_parallel=plan.sp, fp8=plan.sp and plan.fp8_transfers)


def _part_exchanges(context: RankContext, whole: Exchange) -> tuple[PartExchange, ...]:
    """Of the two parts of a chunk that take turns; none where a batch is cut otherwise, or not at all."""
    plan = context.plan
    if not plan.sp or context.micro_batches < 2 or context.dispatches:
        return ()
    if context.copies is not None:
        return tuple(CopiedPartExchange(whole, context.copies, part) for part in range(2))
    return tuple(PartExchange(whole, fp8=plan.fp8_transfers) for _ in range(2))
