"""Choosing the experts of each token: logits from fp32 weights at the speed of bf16, scores, top-k, in one launch."""

from katydid_kernels.router.normed import RoutedRows, add_rms_norm_route
from katydid_kernels.router.op import router, router_reference
from katydid_kernels.router.weight import RouterWeight, split_into_bf16

__all__ = [
    "RoutedRows",
    "RouterWeight",
    "add_rms_norm_route",
    "router",
    "router_reference",
    "split_into_bf16",
]
