"""Traffic as lengths and hashes, a line a finished request, for `katydid simulate`: no word of a prompt is kept.

Lines are those of Mooncake's traces: {"timestamp": Unix ms, "input_length", "output_length", "hash_ids"}, an id for
every 64-token block of the prompt. Ids are keyed by this process's secret: they cannot be matched with known prompts.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from katydid_runtime.errors import SettingsError

__all__ = ["Capture"]

logger = logging.getLogger(__name__)


class Capture:
    """Appends to a file, which grows to `most_bytes` and no further; when writing fails, the capture alone ends."""

    def __init__(self, path: str, most_bytes: int) -> None:
        """Raises SettingsError when the file cannot be written."""
        try:
            self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - open until `close`
        except OSError as error:
            raise SettingsError(f"cannot write {path}: {error.strerror}", field="capture_file", value=path) from error
        self._secret = secrets.token_bytes(16)
        self._most = most_bytes
        self._size = self._file.tell()

    def finished(self, received_ns: int, chain: Sequence[bytes], prompt_tokens: int, output_tokens: int) -> None:
        """A request with this chain of block hashes has ended."""
        if self._file.closed:
            return
        line = json.dumps(
            {
                "timestamp": received_ns // 1_000_000,
                "input_length": prompt_tokens,
                "output_length": output_tokens,
                "hash_ids": [self._id(block) for block in chain] or [secrets.randbits(48)],
            }
        )
        if self._size + len(line) < self._most:
            try:
                self._size += self._file.write(line.encode() + b"\n")
            except OSError as error:
                logger.error("the capture ends here: %s", error)
                self._file.close()

    def close(self) -> None:
        self._file.close()

    def _id(self, block: bytes) -> int:
        return int.from_bytes(blake2b(block, digest_size=6, key=self._secret).digest(), "little")
