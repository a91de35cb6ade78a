"""What the client answers: closed unions of frozen values, made for ``match``.

A cache must never be the reason that an engine stops (I10). So whatever happens to a node or to the network is a
:class:`Miss` (or :class:`Refused`) with its cause, and whatever is wrong with the caller's trust (revoked key,
namespace gone, role too weak) is an :class:`Error`. Nothing here is ever raised::

    match client.get_many([key])[0]:
        case Hit(payload):
            use(payload)
        case Miss(cause=None):
            recompute()
        case Miss(cause):
            recompute(); count_fault(cause.reason)
        case Error(error):
            recompute(); alert(error)

========================================================  ===================================================
:data:`GetResult`, one for each key of a get              ``Hit | Miss | Error``
:data:`PutResult`, one for each item of a put             ``Stored | AlreadyStored | Refused | Error``
:class:`Lookup`, one for a whole ``lookup``               which keys are there
:class:`ChainLookup`, of a chain's ``lookup``             how far a chain can be read
:class:`Deleted`, one for a whole ``delete``              how many were there
:class:`Pong` or :class:`Error`, of ``ping``              how far away the node is
========================================================  ===================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from saltern.errors import (
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    SalternError,
    UnauthenticatedError,
)


@dataclass(frozen=True, slots=True)
class Hit:
    """The entry was there and its checksum matched (I7).

    Attributes:
        payload: the entry's bytes. From ``get_many`` read-only memory of its own; from ``get_into`` the filled part of
            the caller's buffer.
    """

    payload: memoryview

    @property
    def size_bytes(self) -> int:
        return self.payload.nbytes

    def __repr__(self) -> str:
        return f"Hit(<{self.payload.nbytes} bytes>)"


@dataclass(frozen=True, slots=True)
class Miss:
    """The entry could not be had in time.

    Attributes:
        cause: None where the node said that it is not there; else why it could not be asked or believed:
            UnavailableError, DeadlineExceededError, DataLossError, ResourceExhaustedError, ProtocolError, or
            EntryTooLargeError for an entry longer than the caller's buffer.
    """

    cause: SalternError | None = None


@dataclass(frozen=True, slots=True)
class Error:
    """The caller is not trusted (any more): UnauthenticatedError or PermissionDeniedError. Waiting will not help."""

    error: SalternError


@dataclass(frozen=True, slots=True)
class Stored:
    """The entry is readable from now on (I6)."""


@dataclass(frozen=True, slots=True)
class AlreadyStored:
    """An entry of this key was there; its bytes were kept, since a block is immutable."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The entry was not stored, as far as the client knows.

    Attributes:
        error: ResourceExhaustedError with the books in ``metadata`` where a limit refused it (I4); else why the node
            could not be asked (UnavailableError, DeadlineExceededError, ...).
    """

    error: SalternError


GetResult: TypeAlias = Hit | Miss | Error
PutResult: TypeAlias = Stored | AlreadyStored | Refused | Error


class Lookup(msgspec.Struct, frozen=True):
    """Which keys of a batch are there.

    Attributes:
        prefix: how many keys from the first one on are there without a gap.
        found: one for each key, in order.
        error: why the answer may be incomplete, or None; keys that could not be asked for count as absent.
    """

    prefix: int
    found: tuple[bool, ...]
    error: SalternError | None = None


@dataclass(frozen=True, slots=True)
class Deleted:
    """How many entries a delete removed.

    Attributes:
        count: entries that were there and are gone, as far as the node has answered.
        error: why the rest could not be asked for, or None.
    """

    count: int
    error: SalternError | None = None


@dataclass(frozen=True, slots=True)
class Pong:
    """A node that answered.

    Attributes:
        node: identifier of the node.
        transport: ``rdma``, ``shm`` or ``tcp``.
        round_trip_s: seconds from request to reply.
    """

    node: str
    transport: str
    round_trip_s: float


class ChainLookup(msgspec.Struct, frozen=True):
    """What the nodes of a chain have of it.

    Attributes:
        prefix: how many blocks from the first one on can be read without a gap.
        copies_wanted: positions below ``prefix`` that are worth storing again by whoever has their bytes after reading
            them: blocks on one node where the chain deserves two, on a node that is being emptied, or under an epoch
            that ends. Taking them along in the next put is optional.
        error: why the answer may be incomplete, or None.
    """

    prefix: int
    copies_wanted: tuple[int, ...] = ()
    error: SalternError | None = None


_TRUST_ERRORS = (UnauthenticatedError, PermissionDeniedError, NotFoundError, FailedPreconditionError)
#: Said of an epoch that the control plane has just confirmed: the node is a moment behind it, or will be.
_PASSING_REASONS = frozenset({"EPOCH_NOT_AVAILABLE"})


def is_trust_error(error: SalternError) -> bool:
    """Whether the caller is not trusted (any more), so that asking again or elsewhere will not help."""
    return isinstance(error, _TRUST_ERRORS) and error.reason not in _PASSING_REASONS


def get_result(error: SalternError) -> Miss | Error:
    """What a get answers for an error: fail closed on trust, open on everything else (I10)."""
    return Error(error) if is_trust_error(error) else Miss(error)


def put_result(error: SalternError) -> Refused | Error:
    """What a put answers for an error: fail closed on trust, open on everything else (I10)."""
    return Error(error) if is_trust_error(error) else Refused(error)
