"""The operations a model is made of. Each has one public function that picks the kernel for the tensors' device, and a
torch reference beside it that defines the result.
"""

from katydid_kernels.advance import Sampled, StepInputs, advance, advance_reference
from katydid_kernels.block_sparse_prefill import block_sparse_prefill, block_sparse_prefill_reference
from katydid_kernels.decode_attention import DecodeScratch, decode_attention, decode_attention_reference, decode_ctas
from katydid_kernels.decode_plan import decode_plan
from katydid_kernels.fused_moe import fused_moe, fused_moe_reference
from katydid_kernels.fused_moe_w4a8 import fused_moe_w4a8, fused_moe_w4a8_reference
from katydid_kernels.gemm.expert_scales import ExpertScales
from katydid_kernels.kv_pack import (
    kv_pack,
    kv_pack_reference,
    kv_unpack,
    kv_unpack_reference,
    linear_checksum,
    object_bytes,
    published_checksum,
    register_memory,
    unregister_memory,
)
from katydid_kernels.linear import linear, linear_reference
from katydid_kernels.linear_fp8 import linear_fp8, linear_fp8_reference, segment_scale
from katydid_kernels.linear_w4a8 import linear_w4a8, linear_w4a8_reference
from katydid_kernels.peer_reduce import PeerMemory, PeerReducer, emulated_peers, symmetric_peers
from katydid_kernels.prefill_attention import prefill_attention, prefill_attention_reference, prefill_plan
from katydid_kernels.qkv_post import (
    QkNorm,
    qkv_post,
    qkv_post_fp8,
    qkv_post_fp8_reference,
    qkv_post_reference,
)
from katydid_kernels.quantize_rows import (
    FP8_MAX,
    add_rms_norm_quantize,
    add_rms_norm_quantize_reference,
    quantize_fp8,
    quantize_fp8_reference,
    swiglu_quantize,
    swiglu_quantize_reference,
)
from katydid_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from katydid_kernels.rope import rope, rope_reference, rope_table
from katydid_kernels.round_columns import round_columns, round_columns_reference
from katydid_kernels.router import RoutedRows, RouterWeight, add_rms_norm_route, router, router_reference
from katydid_kernels.row_dispatch import gather_rows, join_rows, route_rows, scatter_rows, split_rows
from katydid_kernels.sample import (
    LogitBias,
    Logprobs,
    Penalties,
    SampleScratch,
    SamplingBatch,
    logprobs,
    logprobs_reference,
    sample,
    sample_reference,
    seen_tokens,
)
from katydid_kernels.stem_select import (
    SparsePlan,
    StemRule,
    kept_blocks,
    sparse_plan,
    stem_select,
    stem_select_reference,
)
from katydid_kernels.swiglu import swiglu, swiglu_reference
from katydid_kernels.verify_draft import verify_draft, verify_draft_reference
from katydid_kernels.w4a8.packing import Int4Weight, dequantize_int4, pack_int4, quantize_int4, unpack_int4

__all__ = [
    "FP8_MAX",
    "DecodeScratch",
    "ExpertScales",
    "Int4Weight",
    "LogitBias",
    "Logprobs",
    "PeerMemory",
    "PeerReducer",
    "Penalties",
    "QkNorm",
    "RoutedRows",
    "RouterWeight",
    "SampleScratch",
    "Sampled",
    "SamplingBatch",
    "SparsePlan",
    "StemRule",
    "StepInputs",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "add_rms_norm_quantize_reference",
    "add_rms_norm_reference",
    "add_rms_norm_route",
    "advance",
    "advance_reference",
    "block_sparse_prefill",
    "block_sparse_prefill_reference",
    "decode_attention",
    "decode_attention_reference",
    "decode_ctas",
    "decode_plan",
    "dequantize_int4",
    "emulated_peers",
    "fused_moe",
    "fused_moe_reference",
    "fused_moe_w4a8",
    "fused_moe_w4a8_reference",
    "gather_rows",
    "join_rows",
    "kept_blocks",
    "kv_pack",
    "kv_pack_reference",
    "kv_unpack",
    "kv_unpack_reference",
    "linear",
    "linear_checksum",
    "linear_fp8",
    "linear_fp8_reference",
    "linear_reference",
    "linear_w4a8",
    "linear_w4a8_reference",
    "logprobs",
    "logprobs_reference",
    "object_bytes",
    "pack_int4",
    "prefill_attention",
    "prefill_attention_reference",
    "prefill_plan",
    "published_checksum",
    "qkv_post",
    "qkv_post_fp8",
    "qkv_post_fp8_reference",
    "qkv_post_reference",
    "quantize_fp8",
    "quantize_fp8_reference",
    "quantize_int4",
    "register_memory",
    "rms_norm",
    "rms_norm_reference",
    "rope",
    "rope_reference",
    "rope_table",
    "round_columns",
    "round_columns_reference",
    "route_rows",
    "router",
    "router_reference",
    "sample",
    "sample_reference",
    "scatter_rows",
    "seen_tokens",
    "segment_scale",
    "sparse_plan",
    "split_rows",
    "stem_select",
    "stem_select_reference",
    "swiglu",
    "swiglu_quantize",
    "swiglu_quantize_reference",
    "swiglu_reference",
    "symmetric_peers",
    "unpack_int4",
    "unregister_memory",
    "verify_draft",
    "verify_draft_reference",
]
