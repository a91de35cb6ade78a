"""Both halves of the connector with a real node between them and memory of the test's own for the engine's cache."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from saltern.client import Client
from saltern.credentials import NodeEndpoint, StaticCredentials
from saltern.keys import SaltKey
from saltern.transport.memory import RegisteredBuffer, address_of
from saltern.vllm.clients_in_use import ClientsInUse
from saltern.vllm.fingerprint import Binding
from saltern.vllm.layout import ChainLayout
from saltern.vllm.lookups import Lookups
from saltern.vllm.options import ConnectorOptions
from saltern.vllm.pages import HostPages, Region
from saltern.vllm.scheduling import ScheduledRequest, SchedulerSide, SchedulingRules
from saltern.vllm.stats import Tally
from saltern.vllm.tenancy import Ticket
from saltern.vllm.worker import WorkerSide
from tests.support.static_node import MIB, StaticNode

BLOCK_TOKENS = 16
PAGE_BYTES = 512
TICKET = Ticket("test")


@dataclass
class Request:
    """A request as the scheduler has it; ``tokens`` grow while it decodes."""

    request_id: str
    tokens: list[int]
    prompt_tokens: int = 0
    cache_salt: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        self.prompt_tokens = self.prompt_tokens or len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        hashes, parent = [], repr(self.cache_salt).encode()
        for start in range(0, len(self.tokens) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            parent = sha256(parent + repr(self.tokens[start : start + BLOCK_TOKENS]).encode()).digest()
            hashes.append(parent)
        return hashes


class OneClient:
    """A tenancy of one client that can be taken away."""

    def __init__(self, client: Client) -> None:
        self.only: Client | None = client

    def ticket_for(self, cache_salt: str | None, kv_transfer_params: Mapping[str, object] | None) -> Ticket | None:
        return TICKET

    def client(self, ticket: Ticket) -> Client | None:
        return self.only

    def close(self) -> None:
        """The test closes it."""


class StagedPages(HostPages):
    """Pages that are loaded through the staging area, as a device's are."""

    in_host_memory = False


@dataclass
class EngineMemory:
    """Cache tensors of one rank: groups of layers of pages."""

    blocks: int = 64
    layers: Sequence[int] = (2,)
    kind: type[HostPages] = HostPages
    buffers: list[list[RegisteredBuffer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.blocks * PAGE_BYTES
        self.buffers = [[RegisteredBuffer(size, shared=False) for _ in range(layers)] for layers in self.layers]

    @property
    def pages(self) -> HostPages:
        return self.kind(
            [
                [Region(address_of(buffer.view), PAGE_BYTES, PAGE_BYTES, self.blocks) for buffer in group]
                for group in self.buffers
            ]
        )

    def fill(self, group: int, block_id: int, content: bytes) -> None:
        """Compute a block: each layer's page repeats ``content`` and the layer's number."""
        for layer, buffer in enumerate(self.buffers[group]):
            pattern = (content + bytes([layer])) * PAGE_BYTES
            start = block_id * PAGE_BYTES
            buffer.view[start : start + PAGE_BYTES] = pattern[:PAGE_BYTES]

    def read(self, group: int, block_id: int) -> list[bytes]:
        start = block_id * PAGE_BYTES
        return [bytes(buffer.view[start : start + PAGE_BYTES]) for buffer in self.buffers[group]]

    def close(self) -> None:
        for group in self.buffers:
            for buffer in group:
                ctypes.memset(address_of(buffer.view), 0xEE, buffer.size_bytes)
                buffer.close()


class Halves:
    """A scheduler's half and one worker's, as one engine has them."""

    def __init__(
        self,
        client: Client,
        *,
        layout: ChainLayout,
        memory: EngineMemory,
        rules: SchedulingRules,
        options: ConnectorOptions,
        shard: int = 0,
        binding: bytes = b"b" * 31,
    ) -> None:
        self.layout, self.memory, self.tally = layout, memory, Tally()
        self.tenancy = OneClient(client)
        self.bindings = tuple(Binding(binding + bytes([entry])) for entry in range(layout.entries_per_block))
        clients = ClientsInUse(self.tenancy, layout, max(memory.pages.entry_bytes))
        self.lookups = Lookups(
            clients.get, lambda adapter: self.bindings, layout, self.tally, deadline_ms=options.lookup_deadline_ms
        )
        self.scheduler = SchedulerSide(self.tenancy, self.lookups, layout, rules, self.tally)
        self.worker = WorkerSide(self.tenancy, memory.pages, layout, options, self.tally, shard=shard, stores=True)

    def step(self, *scheduled: tuple[Request, int, int, Sequence[Sequence[int]]]) -> None:
        """One step: requests with tokens computed before it, tokens that it computes, and block tables."""
        work = self.scheduler.plan_step(
            ScheduledRequest(request.request_id, before, tokens, lambda tables=tables: tables)
            for request, before, tokens, tables in scheduled
        )
        self.worker.begin_step(work)
        self.worker.start_loads(work)
        self.worker.save(work)

    def matched(self, request: Request, computed: int = 0) -> tuple[int | None, bool]:
        """What the scheduler is told in the end."""
        while (answer := self.scheduler.matched(request, computed))[0] is None:
            self.scheduler.plan_step([])
        return answer

    def ended(self, count: int = 1) -> tuple[set[str], set[str], set[int]]:
        """Wait for loads to end, and tell the scheduler as the engine does."""
        done: set[str] = set()
        failed: set[str] = set()
        invalid: set[int] = set()
        while len(done) < count:
            results = self.worker.take_load_results()
            done |= results.done
            failed |= results.failed
            invalid |= results.invalid_block_ids
        self.scheduler.loads_ended(done, failed, invalid)
        return done, failed, invalid

    def close(self) -> None:
        self.worker.close()
        self.lookups.close()
        self.memory.close()


@contextmanager
def client_of(node: StaticNode, *, block_tokens: int = BLOCK_TOKENS, transport: str = "auto") -> Iterator[Client]:
    endpoint = NodeEndpoint("node", node.wire_endpoint, str(node.shm_path) if transport != "tcp" else "")
    credentials = StaticCredentials(
        node.token("acme", "chat"),
        namespace="chat",
        tenant="acme",
        nodes=(endpoint,),
        salt_key=SaltKey(b"s" * 32),
        block_tokens=block_tokens,
        block_bytes=MIB,
    )
    with Client.from_credentials(credentials, transport=transport, deadline_ms=30_000) as client:
        yield client


@contextmanager
def engine(
    node: StaticNode,
    *,
    transport: str = "auto",
    layout: ChainLayout | None = None,
    memory: EngineMemory | None = None,
    rules: SchedulingRules | None = None,
    shard: int = 0,
    binding: bytes = b"b" * 31,
    **options: Any,
) -> Iterator[Halves]:
    layout = layout or ChainLayout(BLOCK_TOKENS)
    defaults = {"lookup_deadline_ms": 30_000.0, "load_deadline_ms": 30_000.0, "save_deadline_ms": 30_000.0}
    parsed = ConnectorOptions(**{**defaults, "transport": transport, **options})
    with ExitStack() as resources:
        client = resources.enter_context(client_of(node, block_tokens=layout.tokens_per_entry, transport=transport))
        halves = Halves(
            client,
            layout=layout,
            memory=memory or EngineMemory(),
            rules=rules or SchedulingRules(lookup_wait_s=30.0),
            options=parsed,
            shard=shard,
            binding=binding,
        )
        resources.callback(halves.close)
        yield halves
