"""The clients of an engine's tickets, checked once each: does the namespace fit the model, does it know the buffers."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from saltern.errors import FailedPreconditionError
from saltern.vllm.layout import ChainLayout
from saltern.vllm.tenancy import Tenancy, Ticket

if TYPE_CHECKING:
    from saltern.client import Client
    from saltern.transport.memory import RegisteredBuffer

logger = logging.getLogger(__name__)


class ClientsInUse:
    """Turns tickets into clients that can be used with this engine. Thread-safe.

    Args:
        tenancy: whose clients they are.
        layout: of the engine's chains.
        entry_bytes: the largest entry that this engine stores.
        buffers: memory of this process that entries are moved from and to.
    """

    def __init__(
        self,
        tenancy: Tenancy,
        layout: ChainLayout,
        entry_bytes: int,
        buffers: Sequence[RegisteredBuffer] = (),
    ) -> None:
        self._tenancy = tenancy
        self._layout = layout
        self._entry_bytes = entry_bytes
        self._buffers = buffers
        self._lock = threading.Lock()
        self._verdicts: weakref.WeakKeyDictionary[Client, FailedPreconditionError | None] = weakref.WeakKeyDictionary()

    def get(self, ticket: Ticket) -> Client | None:
        """The client, or None where there is none now or its namespace does not fit: a miss (I10)."""
        client = self._tenancy.client(ticket)
        return client if client is not None and self._verdict(client) is None else None

    def error(self, ticket: Ticket) -> FailedPreconditionError | None:
        """Why a ticket's client does not fit; None where it does, or is not there."""
        client = self._tenancy.client(ticket)
        return None if client is None else self._verdict(client)

    def _verdict(self, client: Client) -> FailedPreconditionError | None:
        with self._lock:
            if client in self._verdicts:
                return self._verdicts[client]
            error = misfit(client, self._layout, self._entry_bytes)
            if error is None:
                for buffer in self._buffers:
                    client.register(buffer)
            else:
                logger.error("no remote cache: %s", error)  # once for each client: it will not get better
            self._verdicts[client] = error
            return error


def misfit(client: Client, layout: ChainLayout, entry_bytes: int) -> FailedPreconditionError | None:
    """Why a namespace cannot hold this engine's blocks, and the command that makes one that can; None if it can."""
    wrong = []
    if client.block_bytes < entry_bytes:
        wrong.append(f"its entries hold {client.block_bytes} bytes and the engine's blocks have {entry_bytes}")
    if client.block_tokens != layout.tokens_per_entry:
        wrong.append(
            f"its entries stand for {client.block_tokens} tokens and the engine's for {layout.tokens_per_entry}"
        )
    if not wrong:
        return None
    return FailedPreconditionError(
        f"namespace {client.namespace!r} of tenant {client.tenant!r} does not fit this engine: {'; '.join(wrong)}",
        reason="NAMESPACE_DOES_NOT_FIT",
        hint=f"make one that does: saltern namespace create {client.tenant} NAME --model-fingerprint MODEL "
        f"--block-tokens {layout.tokens_per_entry} --block-bytes {entry_bytes}",
    )
