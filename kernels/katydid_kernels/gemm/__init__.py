"""The GEMM core: warp-specialised Gluon kernels for Hopper, with plain Triton beside them.

`dense.gemm` multiplies; `experts.run_experts` runs routed experts; `plan` sorts tokens by expert; `plain` is the
fallback.
"""
