"""Saltern: one KV cache for many tenants, each behind its own walls. This is the client.

::

    from saltern import Client, Hit, Miss

    with Client(control="127.0.0.1:7700", api_key=secret, namespace="llama-70b") as client:
        keys = client.block_keys(hashes)
        client.put_many(zip(keys, blocks))
        results = client.get_many(keys)

:class:`Client` and :class:`AsyncClient` answer with the values of :mod:`saltern.results`; the exceptions of wrong use
are drawn in :mod:`saltern.errors`. Names load when they are first used: ``import saltern`` alone costs next to nothing
in an engine's start-up, and gRPC is only imported by who exchanges an API key.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saltern.async_client import AsyncClient
    from saltern.breaker import BreakerPolicy
    from saltern.client import Client
    from saltern.credentials import ApiKeyCredentials, Credentials, Grant, NodeEndpoint, StaticCredentials
    from saltern.errors import (
        AbortedError,
        AlreadyExistsError,
        DataLossError,
        DeadlineExceededError,
        EntryTooLargeError,
        FailedPreconditionError,
        InternalError,
        InvalidArgumentError,
        NotFoundError,
        PermissionDeniedError,
        ProtocolError,
        ResourceExhaustedError,
        SalternError,
        UnauthenticatedError,
        UnavailableError,
    )
    from saltern.keys import BlockHash, BlockKey, SaltKey
    from saltern.results import (
        AlreadyStored,
        Deleted,
        Error,
        GetResult,
        Hit,
        Lookup,
        Miss,
        Pong,
        PutResult,
        Refused,
        Stored,
    )
    from saltern.transport.memory import RegisteredBuffer

__version__ = "0.1.0"

_MODULES: dict[str, tuple[str, ...]] = {
    "async_client": ("AsyncClient",),
    "breaker": ("BreakerPolicy",),
    "client": ("Client",),
    "credentials": ("ApiKeyCredentials", "Credentials", "Grant", "NodeEndpoint", "StaticCredentials"),
    "errors": (
        "AbortedError",
        "AlreadyExistsError",
        "DataLossError",
        "DeadlineExceededError",
        "EntryTooLargeError",
        "FailedPreconditionError",
        "InternalError",
        "InvalidArgumentError",
        "NotFoundError",
        "PermissionDeniedError",
        "ProtocolError",
        "ResourceExhaustedError",
        "SalternError",
        "UnauthenticatedError",
        "UnavailableError",
    ),
    "keys": ("BlockHash", "BlockKey", "SaltKey"),
    "results": (
        "AlreadyStored",
        "Deleted",
        "Error",
        "GetResult",
        "Hit",
        "Lookup",
        "Miss",
        "Pong",
        "PutResult",
        "Refused",
        "Stored",
    ),
    "transport.memory": ("RegisteredBuffer",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "AlreadyStored",
    "ApiKeyCredentials",
    "AsyncClient",
    "BlockHash",
    "BlockKey",
    "BreakerPolicy",
    "Client",
    "Credentials",
    "DataLossError",
    "DeadlineExceededError",
    "Deleted",
    "EntryTooLargeError",
    "Error",
    "FailedPreconditionError",
    "GetResult",
    "Grant",
    "Hit",
    "InternalError",
    "InvalidArgumentError",
    "Lookup",
    "Miss",
    "NodeEndpoint",
    "NotFoundError",
    "PermissionDeniedError",
    "Pong",
    "ProtocolError",
    "PutResult",
    "Refused",
    "RegisteredBuffer",
    "ResourceExhaustedError",
    "SaltKey",
    "SalternError",
    "StaticCredentials",
    "Stored",
    "UnauthenticatedError",
    "UnavailableError",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module when it is first used (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'saltern' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"saltern.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
