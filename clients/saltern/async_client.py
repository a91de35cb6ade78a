"""The asyncio client: the same calls, made by worker threads, so that a frozen node never stops an event loop.

Bulk bytes are moved by blocking system calls that release the GIL; a thread for each call in progress is what keeps
the loop free (I10), and costs nothing while it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from saltern.client import DEADLINE_DEFAULT_MS, SESSIONS_MAX_DEFAULT, Client
from saltern.deadline import Deadline
from saltern.keys import BlockHash, BlockKey

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from saltern.breaker import BreakerPolicy
    from saltern.chain import Chain
    from saltern.credentials import Credentials
    from saltern.results import ChainLookup, Deleted, Error, GetResult, Lookup, Pong, PutResult
    from saltern.tls import ClientTls
    from saltern.transport.memory import RegisteredBuffer

ResultT = TypeVar("ResultT")


class CallRunner(Protocol):
    """Runs a call in a thread, within a deadline that starts when it is asked for."""

    def __call__(self, call: Callable[[Deadline], ResultT], deadline_ms: float | None) -> Awaitable[ResultT]: ...


class AsyncChain:
    """The blocks of one prompt from an event loop; see :class:`saltern.chain.Chain`. One call at a time."""

    def __init__(self, chain: Chain, run: CallRunner) -> None:
        self._chain = chain
        self._run = run

    def __len__(self) -> int:
        return len(self._chain)

    async def lookup(self, *, deadline_ms: float | None = None) -> ChainLookup:
        return await self._run(lambda deadline: self._chain.lookup(deadline_ms=deadline), deadline_ms)

    async def get_many(self, positions: Iterable[int], *, deadline_ms: float | None = None) -> list[GetResult]:
        wanted = list(positions)
        return await self._run(lambda deadline: self._chain.get_many(wanted, deadline_ms=deadline), deadline_ms)

    async def get_into(
        self, positions: Iterable[int], buffers: Iterable[Buffer], *, deadline_ms: float | None = None
    ) -> list[GetResult]:
        wanted, rooms = list(positions), list(buffers)
        return await self._run(lambda deadline: self._chain.get_into(wanted, rooms, deadline_ms=deadline), deadline_ms)

    async def put_many(
        self, items: Iterable[tuple[int, Buffer]], *, deadline_ms: float | None = None
    ) -> list[PutResult]:
        batch = list(items)
        return await self._run(lambda deadline: self._chain.put_many(batch, deadline_ms=deadline), deadline_ms)

    async def delete(self, *, deadline_ms: float | None = None) -> Deleted:
        return await self._run(lambda deadline: self._chain.delete(deadline_ms=deadline), deadline_ms)


class AsyncClient:
    """Reads and writes the entries of one namespace from an event loop; see :class:`saltern.Client` for every method.

    Cancelling a call interrupts its session, which is closed and never used again; the call returns once no thread
    touches its buffers any more.
    """

    def __init__(self, client: Client, *, threads_max: int = SESSIONS_MAX_DEFAULT) -> None:
        """Wrap a client, which is closed with this one; ``connect`` makes both."""
        self._client = client
        self._executor = ThreadPoolExecutor(threads_max, thread_name_prefix="saltern")

    @classmethod
    async def connect(
        cls,
        *,
        control: str,
        api_key: str,
        namespace: str,
        deadline_ms: float = DEADLINE_DEFAULT_MS,
        transport: str = "auto",
        sessions_max: int = SESSIONS_MAX_DEFAULT,
        project: str = "",
        user: str = "",
        session: str = "",
        sharing_group: str = "",
        tls: ClientTls | None = None,
    ) -> Self:
        """Exchange the API key for a token without blocking the loop; arguments and errors as of :class:`Client`."""
        client = await asyncio.to_thread(
            Client,
            control=control,
            api_key=api_key,
            namespace=namespace,
            deadline_ms=deadline_ms,
            transport=transport,
            sessions_max=sessions_max,
            project=project,
            user=user,
            session=session,
            sharing_group=sharing_group,
            tls=tls,
        )
        return cls(client, threads_max=sessions_max)

    @classmethod
    def from_credentials(
        cls,
        credentials: Credentials,
        *,
        deadline_ms: float = DEADLINE_DEFAULT_MS,
        transport: str = "auto",
        sessions_max: int = SESSIONS_MAX_DEFAULT,
        breaker: BreakerPolicy | None = None,
        tls: ClientTls | None = None,
    ) -> Self:
        """A client of credentials that exist already; it closes them with itself."""
        client = Client.from_credentials(
            credentials,
            deadline_ms=deadline_ms,
            transport=transport,
            sessions_max=sessions_max,
            breaker=breaker,
            tls=tls,
        )
        return cls(client, threads_max=sessions_max)

    @property
    def tenant(self) -> str:
        return self._client.tenant

    @property
    def namespace(self) -> str:
        return self._client.namespace

    @property
    def block_bytes(self) -> int:
        return self._client.block_bytes

    @property
    def block_tokens(self) -> int:
        return self._client.block_tokens

    @property
    def epoch(self) -> int:
        return self._client.epoch

    @property
    def transport(self) -> str:
        return self._client.transport

    def block_key(self, block_hash: BlockHash) -> BlockKey:
        return self._client.block_key(block_hash)

    def block_keys(self, block_hashes: Iterable[BlockHash]) -> list[BlockKey]:
        return self._client.block_keys(block_hashes)

    def chain(
        self, block_hashes: Iterable[BlockHash], *, placement_hint: str = "", reused_blocks: int | None = None
    ) -> AsyncChain:
        """The blocks of one prompt; see :meth:`saltern.Client.chain`."""
        chain = self._client.chain(block_hashes, placement_hint=placement_hint, reused_blocks=reused_blocks)
        return AsyncChain(chain, self._run)

    def allocate(self, size_bytes: int) -> RegisteredBuffer:
        return self._client.allocate(size_bytes)

    def register(self, buffer: RegisteredBuffer) -> None:
        """See :meth:`saltern.Client.register`."""
        self._client.register(buffer)

    def register_dmabuf(self, descriptor: int, size_bytes: int) -> RegisteredBuffer:
        """See :meth:`saltern.Client.register_dmabuf`."""
        return self._client.register_dmabuf(descriptor, size_bytes)

    async def put_many(
        self, items: Iterable[tuple[BlockKey, Buffer]], *, deadline_ms: float | None = None
    ) -> list[PutResult]:
        batch = list(items)
        return await self._run(lambda deadline: self._client.put_many(batch, deadline_ms=deadline), deadline_ms)

    async def get_many(self, keys: Iterable[BlockKey], *, deadline_ms: float | None = None) -> list[GetResult]:
        wanted = list(keys)
        return await self._run(lambda deadline: self._client.get_many(wanted, deadline_ms=deadline), deadline_ms)

    async def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer], *, deadline_ms: float | None = None
    ) -> list[GetResult]:
        return await self._run(lambda deadline: self._client.get_into(keys, buffers, deadline_ms=deadline), deadline_ms)

    async def lookup(self, keys: Iterable[BlockKey], *, deadline_ms: float | None = None) -> Lookup:
        wanted = list(keys)
        return await self._run(lambda deadline: self._client.lookup(wanted, deadline_ms=deadline), deadline_ms)

    async def exists(self, keys: Iterable[BlockKey], *, deadline_ms: float | None = None) -> list[bool]:
        return list((await self.lookup(keys, deadline_ms=deadline_ms)).found)

    async def longest_prefix(self, keys: Iterable[BlockKey], *, deadline_ms: float | None = None) -> int:
        return (await self.lookup(keys, deadline_ms=deadline_ms)).prefix

    async def delete(self, keys: Iterable[BlockKey], *, deadline_ms: float | None = None) -> Deleted:
        wanted = list(keys)
        return await self._run(lambda deadline: self._client.delete(wanted, deadline_ms=deadline), deadline_ms)

    async def ping(self, *, node: str = "", deadline_ms: float | None = None) -> Pong | Error:
        return await self._run(lambda deadline: self._client.ping(node=node, deadline_ms=deadline), deadline_ms)

    async def close(self) -> None:
        """Close every session; calls in progress end at once, with a miss."""
        self._client.close()
        await asyncio.to_thread(self._executor.shutdown)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, call: Callable[[Deadline], ResultT], deadline_ms: float | None) -> ResultT:
        # The clock starts here: waiting for a thread counts against the deadline too.
        deadline = self._client.start_deadline(deadline_ms)
        work = self._executor.submit(call, deadline)
        future = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            deadline.cancel()
            # The thread ends at once, its session interrupted; until then it may still write to the caller's buffers.
            if not work.cancel():
                await asyncio.wait([future])
            raise
