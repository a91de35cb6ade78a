"""Entries through shared memory, on the node's own host: the node copies, the client only hashes."""

from __future__ import annotations

from typing import ClassVar

from saltern.credentials import Grant
from saltern.deadline import Deadline
from saltern.errors import UnavailableError
from saltern.transport.connection import Connection
from saltern.transport.memory import Drain, RegisteredBuffer
from saltern.transport.regional import RegionalSession
from saltern.transport.registry import BufferRegistry
from saltern.wire import Empty, Opcode, Register


class ShmSession(RegionalSession):
    """A session over a unix socket, with entries in shared memory."""

    transport: ClassVar[str] = "shm"

    @classmethod
    def open(
        cls, path: str, grant: Grant, registry: BufferRegistry, deadline: Deadline, *, node_id: str, host_id: str
    ) -> ShmSession:
        """Connect and say HELLO.

        Raises:
            UnavailableError: not reachable, or it is not the node that the control plane named: (UNTRUSTED_SOCKET) by
                who listens, found before the token is sent, or (HOST_MISMATCH) by what it answers.
            DeadlineExceededError: not reachable in time.
            UnauthenticatedError, PermissionDeniedError: the node refused the token.
        """
        connection = Connection(path, deadline, peer=f"node {node_id} at {path}")
        try:
            connection.check_listener(path)
        except UnavailableError:
            connection.close()
            raise
        session = cls(connection, grant, registry, deadline)
        if host_id and session.host != host_id:
            session.close()
            raise UnavailableError(
                f"the socket {path} on this host is not node {node_id}'s",
                reason="HOST_MISMATCH",
                hint="the node restarted or runs on another host; tcp works from anywhere",
            )
        return session

    def close(self) -> None:
        if self._being_written:
            # I7: a node that is late could still write to memory that the caller uses for something else by then.
            drain = Drain(self._connection.detach_for_drain())
            for buffer in self._being_written:
                buffer.doubt(drain)
            self._being_written.clear()
        else:
            super().close()
        if self._staging is not None:
            self._staging.close()

    def _register_region(self, region: int, buffer: RegisteredBuffer, deadline: Deadline) -> None:
        self._call(Opcode.REGISTER, Register(region, buffer.size_bytes), Empty, deadline, descriptor=buffer.descriptor)
