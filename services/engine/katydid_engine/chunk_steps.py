"""Passes of a chunk of one prompt, alone or beside decodes, over tensors that never move: CUDA graphs can hold them.

Such passes set the pace of streams while a long prompt comes, and a short prompt's time to its first token: op by op
the host takes longer to launch a deep model than the GPU to compute them. Chunks of a few sizes are prepared, decodes
padded to a bucket of rows, and their drafts to the fewest or the most that there are: captured for each number of
drafts, a rank would be ready a minute later, and what is over costs little beside a chunk. A chunk of another size,
such as a prompt's last, is the beginning of the next larger one; what is over behind it is computed and written
nowhere, if the context has a whole block that it may attend to. Larger chunks are prepared without decodes, and one
that the model computes in two parts, which are twice as many launches. Chunks of prompts that are computed sparsely
have passes of their own. What comes after a pass runs op by op.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Sequence

import torch
from katydid_kernels.stem_select.budget import BLOCK
from torch import Tensor

from katydid_engine.decode_buffers import Bucket
from katydid_engine.decode_steps import Pieces
from katydid_engine.forward_batch import PAGE_SIZE, ForwardBatch
from katydid_engine.kv_cache import KvCache
from katydid_engine.models.decoder_lm import DecoderLM

__all__ = ["ALONE_CHUNKS", "CHUNKS", "SPARSE_CHUNKS", "ChunkSteps"]

CHUNKS = (256, 384, 512, 768, 1024, 1536, 2048)
ALONE_CHUNKS = (3072, 4096, 6144, 8192)
SPARSE_CHUNKS = (256, 512, 1024, 1536, 2048)
_FEWEST_ROWS, _MORE_ROWS = 8, 4
_NOWHERE = -1


class ChunkSteps:
    """Of one rank.

    Args:
        rows: most decodes of a step.
        pages: most of a sequence.
        depths: numbers of drafts that decodes verify.
        chunks: prompt tokens beside them.
        alone: larger numbers of prompt tokens, with no decodes beside them.
        halved: larger ones that the model computes in two parts; such a chunk is neither padded nor sparse.
        sparse: whether they are of prompts that are computed sparsely, instead of such that are not; only of a model
            that does so.
    """

    def __init__(
        self,
        model: DecoderLM,
        kv_cache: KvCache,
        pieces: Pieces,
        *,
        rows: int,
        pages: int,
        depths: Iterable[int] = (0,),
        chunks: Sequence[int] = CHUNKS,
        alone: Sequence[int] = (),
        halved: Sequence[int] = (),
        sparse: bool = False,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._pieces = pieces
        widths = [1 + depth for depth in depths]
        self._widths = sorted({min(widths), max(widths)})
        self._chunks, self._alone, self._halved = (
            sorted(chunk for chunk in sizes if chunk <= pages * PAGE_SIZE) for sizes in (chunks, alone, halved)
        )
        self._rows = _row_buckets(rows)
        beside = self._rows[-1] * self._widths[-1] + max(self._chunks, default=0)
        tokens = max((beside, *self._alone, *self._halved))
        device = model.device
        self._token_ids, self._positions, self._slots = torch.zeros(3, tokens, dtype=torch.int32, device=device)
        self._context_lens = torch.zeros(self._rows[-1] + 1, dtype=torch.int32, device=device)
        self._table = torch.zeros(self._rows[-1] + 1, pages, dtype=torch.int32, device=device)
        ends = torch.arange(self._rows[-1] + 1, dtype=torch.int32, device=device)
        self._ends = {width: ends * width for width in self._widths}
        self._cu_q_lens: dict[tuple[Bucket, int], Tensor] = {}
        self._hidden = torch.zeros(tokens, model.config.hidden_size, dtype=model.dtype, device=device)
        longest = pages * PAGE_SIZE
        self._plans = {
            chunk: (
                model.fixed_prefill(chunk, longest, sparse=False),
                model.fixed_prefill(chunk, longest, sparse=True) if sparse else None,
            )
            for chunk in (*self._chunks, *self._alone)
        }
        self._sparse = sparse

    @property
    def buckets(self) -> list[tuple[Bucket, int]]:
        """With their chunks, the largest first: what it needs of memory is enough for the others."""
        sizes = itertools.product(reversed(self._chunks), reversed(self._widths), reversed(self._rows))
        beside = [(Bucket(rows, width, 0), chunk) for chunk, width, rows in sizes]
        return [*((self._no_decodes, chunk) for chunk in reversed([*self._alone, *self._halved])), *beside]

    @property
    def _no_decodes(self) -> Bucket:
        return Bucket(0, self._widths[0], 0)

    @torch.inference_mode()
    def prepare(self, buckets: Iterable[tuple[Bucket, int]] | None = None) -> None:
        """Prepares buckets, by default all; no step may be under way."""
        gc.collect()
        gc.disable()
        try:
            for bucket, chunk in self.buckets if buckets is None else buckets:
                self._prepare(bucket, chunk)
        finally:
            gc.enable()

    def _prepare(self, bucket: Bucket, chunk: int) -> None:
        ends = self._ends[bucket.width][: bucket.rows + 1]
        self._cu_q_lens[bucket, chunk] = torch.cat((ends, ends[-1:] + chunk))
        self._clear(bucket, chunk)
        self._pieces.prepare(
            self._key(bucket, chunk), lambda: self._forward(bucket, chunk), self._model.one_layer_of_a_kind
        )

    def bucket(self, batch: ForwardBatch) -> tuple[Bucket, int] | None:
        """The smallest that a batch fits, and its chunk; None where it is of another kind."""
        new, decodes = batch.num_tokens - batch.num_decode_tokens, batch.num_decodes
        if decodes != batch.num_seqs - 1 or batch.block_table.shape[1] > self._table.shape[1]:
            return None
        if not decodes and new in self._halved:
            return self._no_decodes, new
        sizes = self._chunks if decodes else [*self._chunks, *self._alone]
        chunk = next((chunk for chunk in sizes if new <= chunk), None)
        width = next((width for width in self._widths if width >= batch.decode_q_len), None)
        rows = next((rows for rows in self._rows if rows >= decodes), None)
        if chunk is None or (new < chunk and batch.ends[0] < BLOCK) or width is None or rows is None:
            return None
        return (self._no_decodes if chunk in self._alone else Bucket(rows, width, 0)), chunk

    def forward(self, bucket: Bucket, chunk: int, batch: ForwardBatch) -> Tensor:
        """What the model's ``forward`` returns for a batch that fits, ``[T, hidden]``; until the next pass."""
        own, begin = batch.num_decode_tokens, bucket.tokens
        decodes, q_len = batch.num_decodes, batch.decode_q_len
        new = batch.num_tokens - own
        for kept, told, filler in (
            (self._token_ids, batch.token_ids, 0),
            (self._positions, batch.positions, 0),
            (self._slots, batch.slot_mapping, _NOWHERE),
        ):
            rows = kept[:begin].fill_(filler).view(bucket.rows, bucket.width)
            rows[:decodes, :q_len].copy_(told[:own].view(decodes, q_len))
            kept[begin : begin + new].copy_(told[own:])
            kept[begin + new : begin + chunk].fill_(filler)
        pages = batch.block_table.shape[1]
        for kept, told in ((self._context_lens, batch.context_lens), (self._table[:, :pages], batch.block_table)):
            kept[:decodes].copy_(told[:-1])
            kept[bucket.rows : bucket.rows + 1].copy_(told[-1:])
        # What is over behind a row's drafts stands behind them in its context as well.
        self._context_lens[:decodes].add_(bucket.width - q_len)
        self._context_lens[decodes : bucket.rows].fill_(0)
        self._plan(chunk, new, batch.ends[0], batch.prefills[0].prompt if self._sparse else None)
        self._pieces.run(self._key(bucket, chunk))
        hidden = self._hidden[: begin + new]
        if own in (0, begin):
            return hidden[begin - own :]
        of_rows = hidden[:begin].view(bucket.rows, bucket.width, -1)[:decodes, :q_len]
        return torch.cat((of_rows.reshape(own, -1), hidden[begin:]))

    def _plan(self, chunk: int, new: int, end: int, prompt: int | None) -> None:
        for fixed in self._plans.get(chunk, ()):
            if fixed is not None:
                fixed.fill(new, end, prompt)

    def _key(self, bucket: Bucket, chunk: int) -> tuple[str, Bucket]:
        return f"chunk of {chunk}" + ", sparse" * self._sparse, bucket

    def _clear(self, bucket: Bucket, chunk: int) -> None:
        """A pass of no decodes and of a chunk that nothing stands before, which writes nowhere."""
        self._context_lens.zero_()
        self._context_lens[bucket.rows] = chunk
        self._slots.fill_(_NOWHERE)
        self._positions.zero_()
        self._positions[bucket.tokens : bucket.tokens + chunk].copy_(torch.arange(chunk))
        self._plan(chunk, chunk, chunk, chunk)

    def _forward(self, bucket: Bucket, chunk: int) -> None:
        tokens, rows = bucket.tokens + chunk, bucket.rows
        batch = ForwardBatch(
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            cu_q_lens=self._cu_q_lens[bucket, chunk],
            context_lens=self._context_lens[: rows + 1],
            block_table=self._table[: rows + 1],
            slot_mapping=self._slots[:tokens],
            num_decodes=rows,
            decode_q_len=bucket.width,
            max_q_len=max(chunk, bucket.width),
            max_context_len=self._table.shape[1] * PAGE_SIZE,
            fixed=self._plans.get(chunk),
            q_lens=(chunk,) if chunk in self._halved else (),
        )
        self._hidden[:tokens].copy_(self._model.forward(batch, self._kv_cache))


def _row_buckets(most: int) -> list[int]:
    rows = [_FEWEST_ROWS]
    while rows[-1] < most:
        rows.append(min(_MORE_ROWS * rows[-1], -(-most // _FEWEST_ROWS) * _FEWEST_ROWS))
    return rows
