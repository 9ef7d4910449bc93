"""Options of every gRPC channel between Katydid's processes and its clients: message size and keepalive."""

from __future__ import annotations

__all__ = ["CHANNEL_OPTIONS", "MAX_MESSAGE_BYTES"]

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
