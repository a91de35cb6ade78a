"""Clients of test nodes, and blocks to put into them."""

from __future__ import annotations

import random

from saltern.breaker import BreakerPolicy
from saltern.client import Client
from saltern.credentials import NodeEndpoint, StaticCredentials
from saltern.keys import BlockKey, SaltKey
from tenants.roles import Role
from tests.support.static_node import StaticNode

#: Generous: a call that meets a healthy node must never be cut short by a busy test machine.
DEADLINE_MS = 30_000


def endpoint_of(node: StaticNode) -> NodeEndpoint:
    return NodeEndpoint("node-1", node.wire_endpoint, str(node.shm_path))


def static_client(
    endpoint: NodeEndpoint,
    token: str = "no-token",
    *,
    transport: str = "auto",
    deadline_ms: float = DEADLINE_MS,
    sessions_max: int = 8,
    breaker: BreakerPolicy | None = None,
) -> Client:
    """A client of one node for the namespace chat, with a given token."""
    credentials = StaticCredentials(
        token, namespace="chat", nodes=(endpoint,), salt_key=SaltKey(bytes(32)), model_fingerprint=b"model"
    )
    return Client.from_credentials(
        credentials, transport=transport, deadline_ms=deadline_ms, sessions_max=sessions_max, breaker=breaker
    )


def node_client(
    node: StaticNode,
    transport: str = "auto",
    *,
    tenant: str = "acme",
    role: Role = Role.WRITER,
    deadline_ms: float = DEADLINE_MS,
    sessions_max: int = 8,
) -> Client:
    """A client of a tenant's namespace chat on a test node."""
    return static_client(
        endpoint_of(node),
        node.token(tenant, "chat", role),
        transport=transport,
        deadline_ms=deadline_ms,
        sessions_max=sessions_max,
    )


def block(number: int, size_bytes: int) -> tuple[BlockKey, bytes]:
    """A key and bytes that only this number has."""
    return BlockKey(number.to_bytes(32, "big")), random.Random(number).randbytes(size_bytes)


def blocks(count: int, size_bytes: int, first: int = 0) -> list[tuple[BlockKey, bytes]]:
    return [block(number, size_bytes) for number in range(first, first + count)]
