"""Clients that have joined a namespace. What a client holds, it holds through its attachment and no longer."""

from __future__ import annotations

import asyncio
import secrets

from katydid_runtime.errors import ConflictError

from katydid_kvcache.blocks import Namespace

__all__ = ["Attachment", "Attachments"]


class Attachment:
    """One client in one namespace; `arena` when it may read and write the shared memory."""

    __slots__ = ("arena", "id", "namespace")

    def __init__(self, attachment_id: int, namespace: Namespace, arena: bool) -> None:
        self.id = attachment_id
        self.namespace = namespace
        self.arena = arena


class Attachments:
    """All attachments. Ids are random, so that one from before a restart can't be mistaken for a present one."""

    def __init__(self) -> None:
        self._attachments: dict[int, Attachment] = {}
        self.draining = asyncio.Event()

    def __len__(self) -> int:
        return len(self._attachments)

    def join(self, namespace: Namespace, *, arena: bool) -> Attachment:
        attachment = Attachment(secrets.randbits(63) or 1, namespace, arena)
        self._attachments[attachment.id] = attachment
        return attachment

    def leave(self, attachment: Attachment) -> None:
        self._attachments.pop(attachment.id, None)

    def find(self, attachment_id: int) -> Attachment:
        """The attachment. Raises ConflictError when there is none of this id (any more)."""
        attachment = self._attachments.get(attachment_id)
        if attachment is None:
            raise ConflictError(
                f"no client is attached as {attachment_id}",
                field="attachment",
                value=attachment_id,
                allowed="the attachment of an open Attach stream",
            )
        return attachment

    def namespaces(self) -> list[Namespace]:
        """Namespaces that somebody is attached to."""
        return list({attachment.namespace: None for attachment in self._attachments.values()})

    def count(self, namespace: Namespace) -> int:
        return sum(attachment.namespace is namespace for attachment in self._attachments.values())
