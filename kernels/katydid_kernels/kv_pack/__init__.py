"""Blocks between pages in GPU memory and store objects in host memory, with a checksum made on the way."""

from katydid_kernels.kv_pack.checksum import linear_checksum, published_checksum
from katydid_kernels.kv_pack.op import kv_pack, kv_unpack, object_bytes
from katydid_kernels.kv_pack.reference import kv_pack_reference, kv_unpack_reference
from katydid_kernels.kv_pack.registered import register_memory, unregister_memory

__all__ = [
    "kv_pack",
    "kv_pack_reference",
    "kv_unpack",
    "kv_unpack_reference",
    "linear_checksum",
    "object_bytes",
    "published_checksum",
    "register_memory",
    "unregister_memory",
]
