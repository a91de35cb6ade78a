"""The synchronous client: batches in, results out, never later than the deadline and never an exception for a miss.

::

    with Client(control="127.0.0.1:7700", api_key=secret, namespace="llama-70b") as client:
        chain = client.chain(engine_block_hashes)  # of one prompt, head first
        chain.put_many(enumerate(blocks))
        for result in chain.get_many(range(len(chain))):
            match result:
                case Hit(payload): ...
                case Miss(cause): ...
                case Error(error): ...

I10: whatever happens to the node or the network is a miss with its cause, within ``deadline_ms``, which covers token,
connecting, transfer and retry together. Only wrong use (a key that is not 32 bytes, a closed client) raises, and the
constructor where it cannot authenticate.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from saltern.arguments import byte_view, checked_keys, room_view
from saltern.breaker import BreakerPolicy
from saltern.chain import Chain
from saltern.chain_plan import prefix_length
from saltern.credentials import ApiKeyCredentials, Credentials
from saltern.deadline import Deadline, DeadlineMs
from saltern.entry_calls import EntryCalls, first_failure
from saltern.epoch_keys import EpochKeys
from saltern.errors import FailedPreconditionError, InvalidArgumentError, SalternError
from saltern.grant import SaltScopeChoice
from saltern.keys import BlockHash, BlockKey
from saltern.results import Deleted, Error, GetResult, Lookup, Pong, PutResult, get_result, put_result
from saltern.routing import Router, Target
from saltern.transport.memory import RegisteredBuffer
from saltern.transport.opening import Transport
from saltern.transport.session import Session
from saltern.transport.slots import GetSlot, PutSlot

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from saltern.tls import ClientTls


DEADLINE_DEFAULT_MS = 1000
SESSIONS_MAX_DEFAULT = 8

SlotT = TypeVar("SlotT", GetSlot, PutSlot)
T = TypeVar("T")


class Client:
    """Reads and writes the entries of one namespace. Thread-safe; after a fork the child opens sessions of its own."""

    def __init__(
        self,
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
    ) -> None:
        """Exchange the API key for a token; nodes are connected to with the first call.

        Args:
            control: ``host:port`` of the control plane.
            api_key: the secret of an API key with the role writer or reader.
            namespace: ``{namespace}`` of the key's tenant.
            deadline_ms: for each call in all, unless the call gives its own.
            transport: ``auto`` (RDMA where this host and the node have it, shared memory with a node on this host,
                else TCP), ``rdma``, ``shm`` or ``tcp``. ``SALTERN_RDMA_DEVICE`` names this host's device.
            sessions_max: connections to a node; more threads than that wait for each other.
            project, user, session: narrow the salt to these, within what the API key is bound to: nobody of another
                project, user or session finds what this client stores, nor the other way round.
            sharing_group: ``tenants/{tenant}/sharingGroups/{group}``: use the group's salt instead of the namespace's.
            tls: whom to trust at the other end of every TCP connection; None for plain text. With it nothing that
                speaks plain text is called; :func:`saltern.tls.client_tls_from_environment` reads ``SALTERN_TLS_CA``.

        Raises:
            InvalidArgumentError: an argument is malformed.
            UnauthenticatedError, PermissionDeniedError: the key or the namespace is not (or no longer) valid.
            UnavailableError, DeadlineExceededError: the control plane does not answer.
        """
        scope = SaltScopeChoice(project, user, session, sharing_group)
        credentials = ApiKeyCredentials(control=control, api_key=api_key, namespace=namespace, scope=scope, tls=tls)
        self._open(credentials, deadline_ms=deadline_ms, transport=transport, sessions_max=sessions_max, tls=tls)

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
        """A client of credentials that exist already; it closes them with itself.

        Args:
            breaker: when a node that fails is left alone, and for how long.
            tls: whom to trust at nodes; None for plain text.
        """
        client = cls.__new__(cls)
        client._open(
            credentials,
            deadline_ms=deadline_ms,
            transport=transport,
            sessions_max=sessions_max,
            breaker=breaker,
            tls=tls,
        )
        return client

    def _open(
        self,
        credentials: Credentials,
        *,
        deadline_ms: float,
        transport: str,
        sessions_max: int,
        breaker: BreakerPolicy | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        if sessions_max < 1:
            raise InvalidArgumentError("sessions_max must be at least 1", reason="INVALID_ARGUMENT")
        try:
            chosen = Transport(transport)
        except ValueError:
            raise InvalidArgumentError(
                f"unknown transport {transport!r}", reason="INVALID_TRANSPORT", hint="use auto, rdma, shm or tcp"
            ) from None
        self._deadline_ms = deadline_ms
        self._keys = EpochKeys()
        self._router = Router(
            credentials,
            chosen,
            sessions_max=sessions_max,
            breaker=breaker or BreakerPolicy(),
            grant=credentials.grant(Deadline(deadline_ms)),
            tls=tls,
        )
        self._calls = EntryCalls(self._router)

    # ---- what this client is -------------------------------------------------------------------------------------

    @property
    def tenant(self) -> str:
        """The tenant, as the control plane named it; nodes take it from the token (I1)."""
        return self._router.grant.tenant

    @property
    def namespace(self) -> str:
        return self._router.grant.namespace

    @property
    def block_bytes(self) -> int:
        """The largest entry of the namespace, in bytes."""
        return self._router.grant.block_bytes

    @property
    def block_tokens(self) -> int:
        """Tokens in one block of the namespace."""
        return self._router.grant.block_tokens

    @property
    def epoch(self) -> int:
        """The salt epoch that keys are derived for and sessions are opened under."""
        return self._router.grant.epoch

    @property
    def transport(self) -> str:
        """``rdma``, ``shm`` or ``tcp``: what the last session was opened over; empty before the first."""
        return self._router.chosen_transport

    def __repr__(self) -> str:
        return f"Client(tenant={self.tenant!r}, namespace={self.namespace!r}, transport={self.transport!r})"

    def block_key(self, block_hash: BlockHash) -> BlockKey:
        """The key of an engine's block under the tenant's current salt; raises InvalidArgumentError for a bad hash."""
        return self.block_keys([block_hash])[0]

    def block_keys(self, block_hashes: Iterable[BlockHash]) -> list[BlockKey]:
        return self._keys.derive(self._router.grant, block_hashes)

    def chain(
        self, block_hashes: Iterable[BlockHash], *, placement_hint: str = "", reused_blocks: int | None = None
    ) -> Chain:
        """The blocks of one prompt, head first: looked up, read and stored together, on two nodes at most.

        Args:
            block_hashes: as the engine computes them, each 1 to 64 bytes; a hash stands for all blocks before it too.
            placement_hint: keeps every chain that has it on the same two nodes, however they grow: a conversation, an
                agent. Readers and writers of a chain must give the same. Empty: decided by the chain itself.
            reused_blocks: how many blocks of this prompt a cache had when it came; None lets the first lookup (or put)
                find out. A worker that only stores should be told what the scheduler found.

        Raises:
            InvalidArgumentError: a hash is not 1 to 64 bytes.
            FailedPreconditionError: the credentials hold no salt key.
        """
        return Chain(
            self._calls,
            self._keys,
            self.start_deadline,
            block_hashes,
            placement_hint=placement_hint,
            reused_blocks=reused_blocks,
        )

    def allocate(self, size_bytes: int) -> RegisteredBuffer:
        """Memory whose slices ``put_many`` and ``get_into`` move without a copy: shared with a node on this host.

        Raises:
            InvalidArgumentError: the size is outside 1 byte .. 64 GiB.
        """
        self._require_open()
        buffer = RegisteredBuffer(size_bytes, shared=self._router.transport is not Transport.TCP)
        self._router.registry.add(buffer)
        return buffer

    def register(self, buffer: RegisteredBuffer) -> None:
        """Move entries straight from and to a buffer that another client of this process has allocated, too.

        Nodes are told of it when a call first uses it, each over this client's own sessions.
        """
        self._require_open()
        self._router.registry.add(buffer)

    def register_dmabuf(self, descriptor: int, size_bytes: int) -> RegisteredBuffer:
        """Memory of a GPU, by its dma-buf, whose slices move over RDMA as those of ``allocate`` do.

        Raises:
            FailedPreconditionError: see :func:`saltern.transport.dmabuf.open_dmabuf`; RDMA_DMABUF_NOT_OFFERED mostly.
        """
        from saltern.transport.dmabuf import open_dmabuf  # most clients have no use for RDMA

        self._require_open()
        buffer = open_dmabuf(descriptor, size_bytes, self._router.transport)
        self._router.registry.add(buffer)
        return buffer

    def start_deadline(self, deadline_ms: DeadlineMs = None) -> Deadline:
        """The deadline of a call that starts now; pass it as ``deadline_ms`` to share it or to cancel the call."""
        self._require_open()
        if isinstance(deadline_ms, Deadline):
            return deadline_ms
        return Deadline(self._deadline_ms if deadline_ms is None else deadline_ms)

    # ---- entries ------------------------------------------------------------------------------------------------

    def put_many(self, items: Iterable[tuple[BlockKey, Buffer]], *, deadline_ms: DeadlineMs = None) -> list[PutResult]:
        """Store entries; returns one result for each, in order.

        Args:
            items: (32-byte key, bytes-like payload of 1 byte to ``block_bytes``). Payloads must not change until the
                call returns. Slices of ``allocate``\\ d memory are not copied over shared memory.
            deadline_ms: for the whole call.

        Raises:
            InvalidArgumentError: a key is not 32 bytes, a payload is empty or not contiguous.
        """
        deadline = self.start_deadline(deadline_ms)
        pairs = list(items)
        keys = checked_keys([key for key, _ in pairs])
        slots = [PutSlot(key, byte_view(payload)) for key, (_, payload) in zip(keys, pairs, strict=True)]
        try:
            self._calls.put(self._by_home(slots, deadline), deadline)
        except SalternError as error:
            return [slot.result or put_result(error) for slot in slots]
        return [slot.answer for slot in slots]

    def get_many(self, keys: Iterable[BlockKey], *, deadline_ms: DeadlineMs = None) -> list[GetResult]:
        """Read entries into memory of their own; returns one result for each key, in order.

        Raises:
            InvalidArgumentError: a key is not 32 bytes.
        """
        deadline = self.start_deadline(deadline_ms)
        return self._get([GetSlot(key, None) for key in checked_keys(keys)], deadline)

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer], *, deadline_ms: DeadlineMs = None
    ) -> list[GetResult]:
        """Read entry i into ``buffers[i]``; a Hit's payload is the filled part of it.

        An entry longer than its buffer is a Miss with cause EntryTooLargeError. What a buffer holds after anything but
        a Hit is undefined.

        Raises:
            InvalidArgumentError: a key is not 32 bytes, a buffer is read-only, empty or not contiguous, or the numbers
                of keys and buffers differ.
        """
        deadline = self.start_deadline(deadline_ms)
        if len(keys) != len(buffers):
            raise InvalidArgumentError(f"{len(keys)} keys but {len(buffers)} buffers", reason="INVALID_ARGUMENT")
        views = [room_view(buffer) for buffer in buffers]
        slots = [GetSlot(key, view) for key, view in zip(checked_keys(keys), views, strict=True)]
        return self._get(slots, deadline)

    def lookup(self, keys: Iterable[BlockKey], *, deadline_ms: DeadlineMs = None) -> Lookup:
        """Ask which keys are there, without touching them; unasked keys count as absent, with ``error`` saying why."""
        deadline = self.start_deadline(deadline_ms)
        wanted = checked_keys(keys)
        try:
            homes = self._homes(wanted, deadline)
            rows, failures = self._calls.lookup(_dealt(wanted, homes), deadline)
        except SalternError as error:
            return Lookup(0, (False,) * len(wanted), error)
        if len(rows) == 1:
            [found] = rows.values()
        else:
            found = bytearray(len(wanted))
            for target, indexes in homes.items():
                for index, there in zip(indexes, rows[target], strict=True):
                    found[index] = there
        return Lookup(prefix_length(found), struct.unpack(f"{len(found)}?", found), first_failure(failures))

    def exists(self, keys: Iterable[BlockKey], *, deadline_ms: DeadlineMs = None) -> list[bool]:
        """Whether each key is there; False where the node could not be asked (``lookup`` says why)."""
        return list(self.lookup(keys, deadline_ms=deadline_ms).found)

    def longest_prefix(self, keys: Iterable[BlockKey], *, deadline_ms: DeadlineMs = None) -> int:
        """How many keys from the first one on are there without a gap; 0 where the node could not be asked."""
        return self.lookup(keys, deadline_ms=deadline_ms).prefix

    def delete(self, keys: Iterable[BlockKey], *, deadline_ms: DeadlineMs = None) -> Deleted:
        """Delete entries, wherever they are; those that are not there are not an error."""
        deadline = self.start_deadline(deadline_ms)
        wanted = checked_keys(keys)
        try:
            nodes = self._router.placement(self._router.current(deadline)).nodes
            count, failures = self._calls.delete({(node.node_id, None): wanted for node in nodes}, deadline)
        except SalternError as error:
            return Deleted(0, error)
        return Deleted(count, first_failure(failures))

    def ping(self, *, node: str = "", deadline_ms: DeadlineMs = None) -> Pong | Error:
        """Ask a node for a sign of life, any one if none is named; whatever prevents it is an Error here."""
        deadline = self.start_deadline(deadline_ms)
        pongs: list[Pong] = []

        def operation(session: Session, deadline: Deadline) -> None:
            began_s = time.perf_counter()
            session.ping(deadline)
            pongs.append(Pong(session.node, session.transport, time.perf_counter() - began_s))

        try:
            nodes = self._router.placement(self._router.current(deadline)).nodes
        except SalternError as error:
            return Error(error)
        failure = self._router.run((node or nodes[0].node_id, None), operation, deadline)
        return Error(failure) if failure else pongs[0]

    # ---- life ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every session; calls in progress in other threads end at once, with a miss."""
        self._router.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside -------------------------------------------------------------------------------------------------

    def _get(self, slots: list[GetSlot], deadline: Deadline) -> list[GetResult]:
        try:
            self._calls.get(self._by_home(slots, deadline), deadline)
        except SalternError as error:
            return [slot.result or get_result(error) for slot in slots]
        return [slot.answer for slot in slots]

    def _by_home(self, slots: list[SlotT], deadline: Deadline) -> Mapping[Target, list[SlotT]]:
        return _dealt(slots, self._homes([slot.key for slot in slots], deadline))

    def _homes(self, keys: Sequence[BlockKey], deadline: Deadline) -> Mapping[Target, Sequence[int]]:
        """The indexes of the keys that each node has to do with, in order."""
        placement = self._router.placement(self._router.current(deadline))
        if len(placement.nodes) == 1:
            return {(placement.nodes[0].node_id, None): range(len(keys))} if keys else {}
        homes: dict[Target, list[int]] = {}
        for index, key in enumerate(keys):
            homes.setdefault((placement.home_of(key).node_id, None), []).append(index)
        return homes

    def _require_open(self) -> None:
        if self._router.closed:
            raise FailedPreconditionError("the client is closed", reason="CLIENT_CLOSED", hint="make a new one")


def _dealt(batch: list[T], homes: Mapping[Target, Sequence[int]]) -> Mapping[Target, list[T]]:
    """The batch by who has to do with it."""
    if len(homes) == 1:
        return dict.fromkeys(homes, batch)
    return {target: [batch[index] for index in indexes] for target, indexes in homes.items()}
