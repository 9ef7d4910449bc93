"""The parts every model here is built from; each takes its own share of the weights and calls ``katydid_kernels``."""
