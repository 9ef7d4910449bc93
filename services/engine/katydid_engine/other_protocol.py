"""Serves vllm.grpc.engine.VllmEngine beside the engine's own protocol where it is wanted: it needs another package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from katydid_runtime.errors import SettingsError
from katydid_runtime.server import RpcServer

if TYPE_CHECKING:
    from katydid_engine.vllm_protocol.service import VllmEngine

__all__ = ["add_other_protocol"]


def add_other_protocol(server: RpcServer, *, wanted: bool) -> VllmEngine | None:
    """Adds the service, to be opened once the model is loaded. Raises SettingsError without the protocol's messages."""
    if not wanted:
        return None
    try:
        from katydid_engine.vllm_protocol.service import VllmEngine, add_to_server
    except ImportError as error:
        raise SettingsError(
            f"the protocol's messages are not installed: {error}",
            field="vllm_protocol",
            value=True,
            allowed="false, or pip install 'katydid[vllm-protocol]'",
        ) from error
    other = VllmEngine()
    add_to_server(other, server.grpc)
    return other
