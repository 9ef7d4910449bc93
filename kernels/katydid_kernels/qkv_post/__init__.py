"""From the fused QKV product to what attention reads: norm, rotation, quantisation, pages written, in one pass."""

from katydid_kernels.qkv_post.op import qkv_post, qkv_post_fp8
from katydid_kernels.qkv_post.reference import QkNorm, qkv_post_fp8_reference, qkv_post_reference

__all__ = ["QkNorm", "qkv_post", "qkv_post_fp8", "qkv_post_fp8_reference", "qkv_post_reference"]
