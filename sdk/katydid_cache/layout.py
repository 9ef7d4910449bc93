"""Shape of one block's store object, `[layer][kv_head][K, V][64 x head_dim]`, and where in it heads and layers lie.

Because kv heads lie side by side within a layer, a tensor-parallel rank's share of a layer is one run of bytes, and
the payload of a read or write is the concatenation of such runs in layout order. Pure arithmetic, shared by the service
and its clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from katydid_runtime.block_hash import BLOCK_TOKENS
from katydid_runtime.errors import InvalidRequestError

__all__ = ["DTYPE_BYTES", "LAYOUT_VERSION", "BlockLayout", "Span", "cut"]

LAYOUT_VERSION = 1

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}

_COUNT_LIMIT = 65_536


@dataclass(frozen=True, slots=True)
class Span:
    """`count` consecutive heads or layers from `first` on; `count` 0 stands for all that follow `first`."""

    first: int = 0
    count: int = 0

    def resolve(self, total: int, field: str) -> range:
        """The indices meant, out of `total`. Raises InvalidRequestError naming `field` when they don't exist."""
        count = self.count or total - self.first
        if self.first < 0 or self.count < 0 or count <= 0 or self.first + count > total:
            raise InvalidRequestError(
                f"{field} {self.first}+{self.count} do not exist",
                field=field,
                value=f"{self.first}+{self.count}",
                allowed=f"within 0..{total}",
            )
        return range(self.first, self.first + count)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Shape of a block's object. `layers` includes MTP layers, `kv_heads` counts those of the whole model.

    Raises InvalidRequestError naming the first field that is out of range.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int = BLOCK_TOKENS
    version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if not 1 <= value <= _COUNT_LIMIT:
                raise InvalidRequestError(
                    f"layout.{name} is {value}", field=f"layout.{name}", value=value, allowed=f"1 to {_COUNT_LIMIT}"
                )
        if self.dtype not in DTYPE_BYTES:
            raise InvalidRequestError(
                f"layout.dtype {self.dtype!r} is unknown",
                field="layout.dtype",
                value=self.dtype,
                allowed=", ".join(DTYPE_BYTES),
            )
        for name, only in (("block_tokens", BLOCK_TOKENS), ("version", LAYOUT_VERSION)):
            value = getattr(self, name)
            if value != only:
                raise InvalidRequestError(
                    f"layout.{name} is {value}", field=f"layout.{name}", value=value, allowed=str(only)
                )

    @property
    def head_bytes(self) -> int:
        """Bytes of K and V of one head of one layer."""
        return 2 * self.block_tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes

    def payload_bytes(self, heads: Span = Span(), layers: Span = Span()) -> int:
        """Bytes of the payload that carries `heads` of `layers` of one block."""
        return sum(run.stop - run.start for run in self.runs(heads, layers))

    def runs(self, heads: Span = Span(), layers: Span = Span()) -> list[range]:
        """Byte ranges of the object that hold `heads` of `layers`, in layout order, neighbours merged."""
        wanted_heads = heads.resolve(self.kv_heads, "heads")
        wanted_layers = layers.resolve(self.layers, "layers")
        if len(wanted_heads) == self.kv_heads:
            return [range(wanted_layers.start * self.layer_bytes, wanted_layers.stop * self.layer_bytes)]
        first, size = wanted_heads.start * self.head_bytes, len(wanted_heads) * self.head_bytes
        starts = (layer * self.layer_bytes + first for layer in wanted_layers)
        return [range(start, start + size) for start in starts]


def cut(runs: Sequence[range], offset: int, size: int) -> list[range]:
    """The parts of the object that hold bytes `offset` to `offset + size` of the payload made of `runs`.

    All runs have the same length, as those of `BlockLayout.runs` do, and the bytes lie within the payload.
    """
    length = len(runs[0])
    parts = []
    end = offset + size
    while offset < end:
        number, skipped = divmod(offset, length)
        taken = min(length - skipped, end - offset)
        start = runs[number].start + skipped
        parts.append(range(start, start + taken))
        offset += taken
    return parts
