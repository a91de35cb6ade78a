"""What a test holds of a deployment: a tenant's store, as an engine is configured for it, and the one engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig

from saltern.chain import Chain
from saltern.client import Client
from saltern.results import Hit, Stored
from tests.vllm.engine import Engine
from tests.vllm.stack import BLOCK_BYTES, NODE_DRAM_BYTES, Stack

#: Deadlines of the tests' engines: a busy machine is not a fault, where a test is not about deadlines.
PATIENT = {
    "open_wait_ms": 60_000,
    "lookup_deadline_ms": 10_000,
    "lookup_wait_ms": 100,
    "load_deadline_ms": 20_000,
    "save_deadline_ms": 20_000,
}
DRAIN_S = 60.0


class Store:
    """A namespace of a tenant of its own."""

    def __init__(
        self,
        stack: Stack,
        tenant: str,
        *,
        block_tokens: int = 32,
        block_bytes: int = BLOCK_BYTES,
        limit_bytes: int = NODE_DRAM_BYTES // 2,
    ) -> None:
        self.stack = stack
        self.tenant = tenant
        self.key_file: Path = stack.add_tenant(
            tenant, block_tokens=block_tokens, block_bytes=block_bytes, limit_bytes=limit_bytes
        )

    def extra_config(self, **options: Any) -> dict[str, Any]:
        """``kv_connector_extra_config`` of its engines: these options over patient ones."""
        extra = {"control": self.stack.control, "namespace": "chat", "api_key_file": str(self.key_file)}
        return extra | PATIENT | options

    def connector(self, *, policy: str = "recompute", **options: Any) -> KVTransferConfig:
        """An engine's whole configuration; see :func:`configuration`."""
        return configuration(self.extra_config(**options), policy)

    def client(self) -> Client:
        return self.stack.client(self.key_file)


def configuration(extra_config: dict[str, Any], policy: str = "recompute") -> KVTransferConfig:
    """How an engine is told to use Saltern.

    Args:
        policy: what vLLM does with a request whose load failed.
    """
    return KVTransferConfig(
        kv_connector="SalternConnector",
        kv_connector_module_path="saltern.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config=extra_config,
    )


class Engines:
    """At most one engine, kept from test to test as long as the same one is asked for: a start takes seconds."""

    def __init__(self) -> None:
        self._made_of: tuple[object, ...] = ()
        self._engine: Engine | None = None

    def get(
        self,
        store: Store | None = None,
        *,
        options: dict[str, Any] | None = None,
        policy: str = "recompute",
        **engine: Any,
    ) -> Engine:
        """An engine.

        Args:
            store: where its connector stores; None for none.
            options: of the connector.
            policy: see :func:`configuration`.
            engine: of vLLM, and ``model``.
        """
        made_of = (store, repr(options), policy, repr(sorted(engine.items())))
        if self._engine is None or made_of != self._made_of:
            self.close()
            connector = None if store is None else store.connector(policy=policy, **(options or {}))
            self._engine, self._made_of = Engine(connector, **engine), made_of
        return self._engine

    def new(self, store: Store | None = None, **options: Any) -> Engine:
        """The same, made anew: nothing is left of the engine before."""
        self.close()
        return self.get(store, **options)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def drain(engine: Engine) -> None:
    """Wait until all that the engine has computed is stored or refused."""
    assert engine.worker_connector.drain(DRAIN_S), "saves hang"


@contextmanager
def chains_recorded() -> Iterator[set[tuple[bytes, ...]]]:
    """What every chain that any client makes in the block is made of: how a test learns where entries are."""
    seen: set[tuple[bytes, ...]] = set()
    original = Client.chain

    def chain(self: Client, block_hashes: Any, **options: Any) -> Chain:
        hashes = tuple(block_hashes)
        seen.add(hashes)
        return original(self, hashes, **options)

    Client.chain = chain  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Client.chain = original  # type: ignore[method-assign]


def put_zeros(client: Client, chains: set[tuple[bytes, ...]]) -> int:
    """Overwrite every entry of these chains with as many zeros, checksums and all; returns how many there were."""
    overwritten = 0
    for hashes in chains:
        chain = client.chain(hashes)
        found = chain.get_many(range(len(hashes)))
        there = [(index, len(bytes(one.payload))) for index, one in enumerate(found) if isinstance(one, Hit)]
        keys = client.block_keys(hashes)
        client.delete([keys[index] for index, _ in there])
        results = chain.put_many((index, bytes(size)) for index, size in there)
        assert all(isinstance(result, Stored) for result in results), results
        overwritten += len(there)
    return overwritten
