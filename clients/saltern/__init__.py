"""Saltern: one KV cache for many tenants, each behind its own walls. This is the client.

::

    from saltern import Client, Hit, Miss

    with Client(control="127.0.0.1:7700", api_key=secret, namespace="llama-70b") as client:
        chain = client.chain(block_hashes)
        results = chain.get_many(range(chain.lookup().prefix))
        chain.put_many(enumerate(blocks))

:class:`Client` and :class:`AsyncClient` answer with the values of :mod:`saltern.results`; the exceptions of wrong use
are drawn in :mod:`saltern.errors`. Names load when they are first used: ``import saltern`` alone costs next to nothing
in an engine's start-up, and gRPC is only imported by who exchanges an API key.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saltern.async_client import AsyncChain, AsyncClient
    from saltern.breaker import BreakerPolicy
    from saltern.chain import Chain
    from saltern.client import Client
    from saltern.credentials import ApiKeyCredentials, Credentials, StaticCredentials
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
    from saltern.grant import EpochSalt, Grant, NodeEndpoint, SaltScopeChoice
    from saltern.keys import BlockHash, BlockKey, SaltKey
    from saltern.results import (
        AlreadyStored,
        ChainLookup,
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
    from saltern.token_credentials import TokenCredentials
    from saltern.transport.memory import RegisteredBuffer

__version__ = "0.1.0"

_MODULES: dict[str, tuple[str, ...]] = {
    "async_client": ("AsyncChain", "AsyncClient"),
    "breaker": ("BreakerPolicy",),
    "chain": ("Chain",),
    "client": ("Client",),
    "credentials": ("ApiKeyCredentials", "Credentials", "StaticCredentials"),
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
    "grant": ("EpochSalt", "Grant", "NodeEndpoint", "SaltScopeChoice"),
    "keys": ("BlockHash", "BlockKey", "SaltKey"),
    "results": (
        "AlreadyStored",
        "ChainLookup",
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
    "token_credentials": ("TokenCredentials",),
    "transport.memory": ("RegisteredBuffer",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "AlreadyStored",
    "ApiKeyCredentials",
    "AsyncChain",
    "AsyncClient",
    "BlockHash",
    "BlockKey",
    "BreakerPolicy",
    "Chain",
    "ChainLookup",
    "Client",
    "Credentials",
    "DataLossError",
    "DeadlineExceededError",
    "Deleted",
    "EntryTooLargeError",
    "EpochSalt",
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
    "SaltScopeChoice",
    "SalternError",
    "StaticCredentials",
    "Stored",
    "TokenCredentials",
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
