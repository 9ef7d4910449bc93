"""Which plan for which model on which GPUs: memory, latency and throughput out of measured speeds and a model of links.

Pure arithmetic: no torch, no GPU. ``katydid plan`` prints it.
"""
