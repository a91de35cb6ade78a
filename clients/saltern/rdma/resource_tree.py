"""Lifetimes: what is made from something is closed before it, once, and never used after."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from types import TracebackType
from typing import ClassVar, Self

from saltern.errors import FailedPreconditionError
from saltern.rdma.bindings.interface import Binding, Handle
from saltern.rdma.faults import verbs


class Resource(ABC):
    """Something of the device's that must be closed; a context manager.

    Parents know their children and close them first: queue pairs, then regions, then completion queues, then domains,
    the youngest first. So whoever closes a Device has closed everything, in an order that the device accepts.
    Not thread-safe: one thread at a time uses a device and what was made from it.
    """

    kind: ClassVar[str] = "resource"
    #: Order among siblings; smaller is closed first.
    close_rank: ClassVar[int] = 0

    def __init__(self, binding: Binding, *parents: Resource) -> None:
        for parent in parents:
            parent.handle  # noqa: B018 - raises where it is closed
        self._binding = binding
        self._handle: Handle | None = None
        self._parents = parents
        self._children: dict[Resource, None] = {}
        self._closed = False

    def _open(self, handle: Handle) -> None:
        """Take over a handle that was just made."""
        self._handle = handle
        for parent in self._parents:
            parent._children[self] = None

    @property
    def handle(self) -> Handle:
        """The binding's object.

        Raises:
            FailedPreconditionError: RDMA_CLOSED. With pyverbs, going on would end the process.
        """
        if self._handle is None:
            raise FailedPreconditionError(
                f"this RDMA {self.kind} is closed", reason="RDMA_CLOSED", hint="make a new one; it cannot be reopened"
            )
        return self._handle

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Close the children, then this. A second call does nothing.

        Raises:
            SalternError: the device refused to give something back; the rest is closed nevertheless.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            stack.callback(self._end)
            # Callbacks run last in, first out: so the first to close is pushed last.
            for child in sorted(self._children, key=lambda each: each.close_rank, reverse=True):
                stack.callback(child.close)

    def _end(self) -> None:
        for parent in self._parents:
            parent._children.pop(self, None)
        handle, self._handle = self._handle, None
        if handle is not None:
            with verbs(f"closing an RDMA {self.kind}"):
                self._destroy(handle)

    @abstractmethod
    def _destroy(self, handle: Handle) -> None:
        """Give what this kind of resource is back to the device."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
