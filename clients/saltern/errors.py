"""Every error that Saltern raises, in one tree.

::

    SalternError
    ├── InvalidArgumentError        the request itself is wrong, whatever the state of the service
    │   └── ProtocolError           bytes on the wire break proto/WIRE.md; the session is closed
    ├── UnauthenticatedError        no token, or one that does not verify (I1)
    ├── PermissionDeniedError       verified, but not allowed, or absent: both answer the same
    ├── NotFoundError               absent, told only to callers who may list the parent
    ├── AlreadyExistsError
    ├── FailedPreconditionError     right request, wrong state (suspended tenant, quota below use)
    ├── AbortedError                a concurrent change won; read again and retry (etag mismatch)
    ├── ResourceExhaustedError      a quota or a limit refused it (I4, I6); carries the books
    │   └── EntryTooLargeError      can never fit, refused before anything is evicted (I6)
    ├── DeadlineExceededError
    ├── UnavailableError            the other side is not there now; retry later (I10)
    ├── DataLossError               a checksum does not match: whole or absent (I7)
    └── InternalError               a fault of ours

Each error names what was asked, what refused it and what to do next: ``message`` says the first two in one line,
``hint`` the third. ``reason`` is an UPPER_SNAKE_CASE constant for programs (AIP-193 ``ErrorInfo.reason``) and
``metadata`` its machine-readable details. None of them may ever hold a token, a salt or a key; what somebody pasted
into the wrong field is taken out of the message here, in the one place that every error passes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from enum import IntEnum
from typing import ClassVar, Final, Self

#: API keys, bootstrap tokens and tokens, cut off or whole.
_SECRET_TEXT: Final = re.compile(
    r"sk-saltern-[0-9a-f]{16}[\w-]*|bootstrap-saltern-[\w-]{8,}|eyJ[\w-]{10,}[\w.-]*", re.ASCII
)


class StatusCode(IntEnum):
    """Status of a reply on the wire protocol: the numbers of ``google.rpc.Code``, so that both doors agree."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


def without_secrets(text: str) -> str:
    """``text`` without API keys, tokens and beginnings of them: somebody may have pasted one into the wrong place."""
    return _SECRET_TEXT.sub("<secret>", text)


class SalternError(Exception):
    """Base of every error that Saltern raises.

    Args:
        message: one line: what was asked and which limit or rule refused it.
        reason: UPPER_SNAKE_CASE constant, stable across releases; programs branch on it.
        hint: what to do next, one line; empty where there is nothing to do.
        metadata: string details for programs (tenant, tier, used_bytes, ...); never a secret.
        retry_after_ms: when a retry may succeed, or None where a retry of the same request is pointless.
    """

    code: ClassVar[StatusCode] = StatusCode.INTERNAL
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        hint: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        self.message = without_secrets(message)
        super().__init__(self.message)
        self.reason = reason or self.default_reason
        self.hint = hint
        self.metadata: dict[str, str] = dict(metadata or {})
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def again(self) -> Self:
        """The same error, not raised yet: for whoever keeps one to raise it more than once.

        An error that is raised anew keeps the frames of every time before, and all that lay in them.
        """
        return copy.copy(self)


class InvalidArgumentError(SalternError):
    code = StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"


class ProtocolError(InvalidArgumentError):
    default_reason = "PROTOCOL_ERROR"


class UnauthenticatedError(SalternError):
    code = StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class PermissionDeniedError(SalternError):
    code = StatusCode.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class NotFoundError(SalternError):
    code = StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class AlreadyExistsError(SalternError):
    code = StatusCode.ALREADY_EXISTS
    default_reason = "ALREADY_EXISTS"


class FailedPreconditionError(SalternError):
    code = StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class AbortedError(SalternError):
    code = StatusCode.ABORTED
    default_reason = "ABORTED"


class ResourceExhaustedError(SalternError):
    """A quota or limit refused the request (I4, I6). ``metadata``: tenant, tier, used_bytes, limit_bytes."""

    code = StatusCode.RESOURCE_EXHAUSTED
    default_reason = "QUOTA_EXCEEDED"


class EntryTooLargeError(ResourceExhaustedError):
    default_reason = "ENTRY_TOO_LARGE"


class DeadlineExceededError(SalternError):
    code = StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class UnavailableError(SalternError):
    code = StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class DataLossError(SalternError):
    code = StatusCode.DATA_LOSS
    default_reason = "CHECKSUM_MISMATCH"


class InternalError(SalternError):
    code = StatusCode.INTERNAL
    default_reason = "INTERNAL"


_BY_REASON: dict[str, type[SalternError]] = {kind.default_reason: kind for kind in (ProtocolError, EntryTooLargeError)}
_BY_CODE: dict[StatusCode, type[SalternError]] = {
    kind.code: kind
    for kind in (
        InvalidArgumentError,
        UnauthenticatedError,
        PermissionDeniedError,
        NotFoundError,
        AlreadyExistsError,
        FailedPreconditionError,
        AbortedError,
        ResourceExhaustedError,
        DeadlineExceededError,
        UnavailableError,
        DataLossError,
        InternalError,
    )
}


def error_from_status(
    code: int,
    message: str,
    *,
    reason: str = "",
    hint: str = "",
    metadata: Mapping[str, str] | None = None,
    retry_after_ms: int | None = None,
) -> SalternError:
    """Build the exception of the tree that a received status stands for; an unknown code becomes InternalError."""
    kind = _BY_REASON.get(reason)
    if kind is None or kind.code != code:
        kind = _BY_CODE.get(StatusCode(code)) if code in StatusCode.__members__.values() else None
    return (kind or InternalError)(
        message, reason=reason or None, hint=hint, metadata=metadata, retry_after_ms=retry_after_ms
    )
