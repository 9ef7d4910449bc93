"""Every gRPC channel between Katydid's processes and its clients: message size, keepalive, TLS."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from katydid_runtime.tls import Tls

__all__ = ["CHANNEL_OPTIONS", "MAX_MESSAGE_BYTES", "open_channel"]

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""A silent peer is noticed within 30 s; `RpcServer` permits these pings."""


def open_channel(
    address: str,
    tls: Tls | None = None,
    options: Sequence[tuple[str, int]] = CHANNEL_OPTIONS,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
) -> grpc.aio.Channel:
    """A channel to `address` ("host:port" or "unix:/path"): plain text without `tls`, and always to a Unix socket."""
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options, interceptors=interceptors)
