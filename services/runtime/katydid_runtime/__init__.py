"""What every Katydid process shares; nothing here knows what a service does, and nothing imports torch.

errors            the error tree and its one table of statuses      (no third-party import)
block_hash        names of KV blocks                                (no third-party import)
tokenizer_digest  whether two processes tokenise alike              (no third-party import)
duration          seconds and protobuf durations                    (no third-party import but protobuf)
trace_context     W3C trace context as a value                      (no third-party import)
log               JSON lines with request and trace id              (no third-party import)
telemetry         spans, exported to a file or over OTLP            (OpenTelemetry only when tracing is on)
metrics           Prometheus names and bounds
fault_delays      delays that tests inject                          (no third-party import)
settings          one frozen settings class a service
bearer            a bearer token on every call of a channel
channel           options of the gRPC channels between processes
interceptors      one context manager around every RPC
rpc_errors        errors across gRPC, both ways
server            bind, health, drain, stop
exposition        /metrics, /healthz and /readyz of a gRPC service
process           from a command line to a running service
"""
