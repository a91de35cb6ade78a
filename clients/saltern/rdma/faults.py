"""Failed verbs as errors of the tree, with what to do about each."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from saltern.errors import (
    FailedPreconditionError,
    InternalError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SalternError,
    UnavailableError,
)
from saltern.rdma.bindings.interface import VerbsError
from saltern.sizes import format_size

_Row = tuple[type[SalternError], str, str]

_NO_ROUTE: Final = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ETIMEDOUT)
_NOT_PERMITTED: Final[_Row] = (
    PermissionDeniedError,
    "RDMA_NOT_PERMITTED",
    "let this user read and write /dev/infiniband/uverbs* (containers: pass the devices on)",
)
_EXHAUSTED: Final[_Row] = (
    ResourceExhaustedError,
    "RDMA_RESOURCES",
    "the device or the process is out of queue pairs, queues or descriptors: close some",
)
_NO_DEVICE: Final[_Row] = (
    FailedPreconditionError,
    "RDMA_NO_DEVICE",
    "`saltern doctor` lists the devices of this machine",
)
_BY_NUMBER: Final[dict[int, _Row]] = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), _NOT_PERMITTED),
    **dict.fromkeys((errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.EAGAIN), _EXHAUSTED),
    **dict.fromkeys((errno.ENODEV, errno.ENOENT, errno.ENXIO, errno.ENOSYS, errno.EIO), _NO_DEVICE),
    errno.EOPNOTSUPP: (FailedPreconditionError, "RDMA_NOT_OFFERED", "this device or driver does not offer it"),
}


@contextmanager
def verbs(doing: str) -> Iterator[None]:
    """Translate VerbsError inside; ``doing`` says what was asked, as in "registering 4096 bytes"."""
    try:
        yield
    except VerbsError as fault:
        raise error_of(fault, doing) from fault


def error_of(fault: VerbsError, doing: str) -> SalternError:
    """The error of a failed verb; see the module."""
    text = f"{doing} failed: {fault}"
    metadata = {"verb": fault.verb, "errno": errno.errorcode.get(fault.number, str(fault.number))}
    row = _of_registration(fault) or _BY_NUMBER.get(fault.number) or _of_connection(fault)
    kind, reason, hint = row or (InternalError, "RDMA_VERB_FAILED", "report it with this line")
    if reason == "RDMA_MEMLOCK":
        metadata["memlock"] = memlock_limit()
        text = f"{text}; this process may lock {metadata['memlock']}"
    return kind(text, reason=reason, hint=hint, metadata=metadata)


def _of_registration(fault: VerbsError) -> _Row | None:
    if "reg_" not in fault.verb:
        return None
    if fault.number == errno.ENOMEM:
        return (
            ResourceExhaustedError,
            "RDMA_MEMLOCK",
            "raise the limit of locked memory: ulimit -l unlimited, LimitMEMLOCK=infinity in the systemd unit, "
            "--ulimit memlock=-1 for a container",
        )
    if fault.number == errno.EFAULT:
        hint = "the memory is not mapped, or is read-only and asked for with write access"
        return FailedPreconditionError, "RDMA_MEMORY_INVALID", hint
    return None


def _of_connection(fault: VerbsError) -> _Row | None:
    if "modify_qp" not in fault.verb:
        return None
    hint = "both GIDs must be of one network: compare `saltern doctor` on both sides, or name a GID index"
    if fault.number in _NO_ROUTE:
        return UnavailableError, "RDMA_GID_UNREACHABLE", hint
    return FailedPreconditionError, "RDMA_CONNECT_REFUSED", hint


def memlock_limit() -> str:
    """How much memory this process may lock, in words."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "any amount" if soft == resource.RLIM_INFINITY else format_size(soft)
