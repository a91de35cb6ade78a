"""Several nodes that one token is good at, and clients of them all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from saltern.breaker import BreakerPolicy
from saltern.client import Client
from saltern.credentials import Grant, NodeEndpoint, StaticCredentials
from saltern.grant import EpochSalt
from saltern.keys import BlockHash, SaltKey
from tenants.policy import TenantPolicy
from tests.support.clients import DEADLINE_MS
from tests.support.node_process import NodeProcess, node_process
from tests.support.static_node import MIB, StaticNode, static_node

#: Tokens in a block: eight blocks are a head.
BLOCK_TOKENS = 512
HEAD = 8


def hashes(count: int, first: int = 0) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(8, "little")) for number in range(first, first + count)]


def block_of(position: int, size_bytes: int = 2000) -> bytes:
    """Bytes that only this position has."""
    return position.to_bytes(4, "little") * (size_bytes // 4)


def items(positions: Sequence[int] | range) -> list[tuple[int, bytes]]:
    return [(position, block_of(position)) for position in positions]


@contextmanager
def static_nodes(
    count: int, tenants: Mapping[str, TenantPolicy] | None = None, *, dram_bytes: int = 32 * MIB
) -> Iterator[list[StaticNode]]:
    """``count`` nodes in threads, node-0 and so on."""
    key = Ed25519PrivateKey.generate()
    with ExitStack() as stack:
        yield [
            stack.enter_context(static_node(tenants, dram_bytes=dram_bytes, node_id=f"node-{number}", signing_key=key))
            for number in range(count)
        ]


@contextmanager
def node_processes(count: int) -> Iterator[tuple[list[NodeProcess], Ed25519PrivateKey]]:
    """``count`` nodes in processes, node-0 and so on, to be frozen and killed; and the key to start another with."""
    key = Ed25519PrivateKey.generate()
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(node_process(dram_bytes=16 * MIB, node_id=f"node-{number}", signing_key=key))
            for number in range(count)
        ]
        yield nodes, key


def endpoints_of(
    nodes: Sequence[StaticNode | NodeProcess], *, read_only: Sequence[int] = (), shm: bool = False
) -> tuple[NodeEndpoint, ...]:
    """Over TCP unless told otherwise: what is done on several nodes is mostly the same over shared memory."""
    return tuple(
        NodeEndpoint(
            f"node-{number}",
            node.wire_endpoint,
            str(node.shm_path) if shm else "",
            read_only=number in read_only,
        )
        for number, node in enumerate(nodes)
    )


class ChangingCredentials(StaticCredentials):
    """Credentials whose grant a test replaces; ``exchanges`` counts how often a newer one was asked for."""

    def __init__(self, grant: Grant) -> None:
        super().__init__(grant.access_token, namespace=grant.namespace, nodes=grant.nodes)
        self._grant = grant
        self.next: Grant | None = None
        self.exchanges = 0

    def change(self, grant: Grant) -> None:
        with self._lock:
            self._grant = grant

    def renewed(self, stale: Grant, deadline: object) -> Grant:
        self.exchanges += 1
        if self.next is not None:
            self.change(self.next)
        return self._grant


def grant_for(token: str, endpoints: tuple[NodeEndpoint, ...], *, epochs: Sequence[int] = (1,)) -> Grant:
    """A grant of acme's namespace chat; each epoch has a salt of its own."""
    return Grant(
        access_token=token,
        expires_at_s=float("inf"),
        tenant="acme",  # type: ignore[arg-type]
        namespace="chat",  # type: ignore[arg-type]
        nodes=endpoints,
        salts=tuple(EpochSalt(epoch, SaltKey(bytes([epoch]) * 32)) for epoch in epochs),
        epoch=epochs[-1],
        model_fingerprint=b"model",
        block_tokens=BLOCK_TOKENS,
    )


def client_of(
    grant: Grant | ChangingCredentials,
    *,
    deadline_ms: float = DEADLINE_MS,
    breaker: BreakerPolicy | None = None,
    sessions_max: int = 8,
) -> Client:
    credentials = grant if isinstance(grant, ChangingCredentials) else ChangingCredentials(grant)
    return Client.from_credentials(
        credentials, transport="auto", deadline_ms=deadline_ms, breaker=breaker, sessions_max=sessions_max
    )
