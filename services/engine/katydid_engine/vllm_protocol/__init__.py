"""The de-facto engine protocol `vllm.grpc.engine.VllmEngine`, so that other gateways can front this engine.

Its messages come from the package smg-grpc-proto, an optional extra: nothing else of the engine imports this package.
"""
