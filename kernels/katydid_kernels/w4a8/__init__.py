"""int4 weights with fp8 activations: the packed format, its kernels, and what launches them.

`packing` quantises and lays weights out; `launch` multiplies by one matrix, `experts` by routed ones.
"""
