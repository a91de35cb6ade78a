"""The synchronous client: batches in, results out, never later than the deadline and never an exception for a miss.

::

    with Client(control="127.0.0.1:7700", api_key=secret, namespace="llama-70b") as client:
        keys = client.block_keys(engine_block_hashes)
        client.put_many(zip(keys, blocks))
        for result in client.get_many(keys):
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
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

from saltern.arguments import byte_view, checked_keys, room_view
from saltern.breaker import BreakerPolicy
from saltern.credentials import ApiKeyCredentials, Credentials
from saltern.deadline import Deadline
from saltern.errors import (
    DataLossError,
    EntryTooLargeError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    SalternError,
)
from saltern.keys import BlockHash, BlockKey, BlockKeyDeriver
from saltern.results import (
    Deleted,
    Error,
    GetResult,
    Hit,
    Lookup,
    Miss,
    Pong,
    PutResult,
    Refused,
    get_result,
    put_result,
)
from saltern.routing import Router
from saltern.transport.memory import RegisteredBuffer
from saltern.transport.opening import Transport
from saltern.transport.registry import in_doubt_error
from saltern.transport.session import Session, split_requests
from saltern.transport.slots import GetSlot, PutSlot
from saltern.wire import KEYS_MAX

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from saltern.tls import ClientTls


#: Milliseconds for the call, a deadline that runs already, or None for the client's default.
DeadlineMs: TypeAlias = float | Deadline | None
DEADLINE_DEFAULT_MS = 1000
SESSIONS_MAX_DEFAULT = 8
#: One attempt, and one more where the first met an old session or an old token.
_ATTEMPTS = 2


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
        tls: ClientTls | None = None,
    ) -> None:
        """Exchange the API key for a token; nodes are connected to with the first call.

        Args:
            control: ``host:port`` of the control plane.
            api_key: the secret of an API key with the role writer or reader.
            namespace: ``{namespace}`` of the key's tenant.
            deadline_ms: for each call in all, unless the call gives its own.
            transport: ``auto`` (shared memory with a node on this host, else TCP), ``shm`` or ``tcp``.
            sessions_max: connections to a node; more threads than that wait for each other.
            tls: whom to trust at the other end of every TCP connection; None for plain text. With it nothing that
                speaks plain text is called; :func:`saltern.tls.client_tls_from_environment` reads ``SALTERN_TLS_CA``.

        Raises:
            InvalidArgumentError: an argument is malformed.
            UnauthenticatedError, PermissionDeniedError: the key or the namespace is not (or no longer) valid.
            UnavailableError, DeadlineExceededError: the control plane does not answer.
        """
        credentials = ApiKeyCredentials(control=control, api_key=api_key, namespace=namespace, tls=tls)
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
                f"unknown transport {transport!r}", reason="INVALID_TRANSPORT", hint="use auto, shm or tcp"
            ) from None
        self._deadline_ms = deadline_ms
        self._entry_bytes_seen = 0
        self._deriver: tuple[int, BlockKeyDeriver] | None = None
        self._router = Router(
            credentials,
            chosen,
            sessions_max=sessions_max,
            breaker=breaker or BreakerPolicy(),
            grant=credentials.grant(Deadline(deadline_ms)),
            tls=tls,
        )

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
        """``shm`` or ``tcp``: what the last session was opened over; empty before the first."""
        return self._router.chosen_transport

    def __repr__(self) -> str:
        return f"Client(tenant={self.tenant!r}, namespace={self.namespace!r}, transport={self.transport!r})"

    def block_key(self, block_hash: BlockHash) -> BlockKey:
        """The key of an engine's block under the tenant's current salt; raises InvalidArgumentError for a bad hash."""
        return self._current_deriver().derive(block_hash)

    def block_keys(self, block_hashes: Iterable[BlockHash]) -> list[BlockKey]:
        return self._current_deriver().derive_many(block_hashes)

    def allocate(self, size_bytes: int) -> RegisteredBuffer:
        """Memory whose slices ``put_many`` and ``get_into`` move without a copy: shared with a node on this host.

        Raises:
            InvalidArgumentError: the size is outside 1 byte .. 64 GiB.
        """
        self._require_open()
        buffer = RegisteredBuffer(size_bytes, shared=self._router.transport is not Transport.TCP)
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
        for slot, place in zip(
            slots, self._router.registry.locate_doubtful([slot.view for slot in slots]), strict=True
        ):
            if place is not None:
                slot.result = Refused(in_doubt_error())

        def operation(session: Session) -> None:
            for slot in slots:
                if slot.view.nbytes > session.entry_max_bytes:
                    slot.result = Refused(_too_large(slot.view.nbytes, session.entry_max_bytes))
            session.put([slot for slot in slots if slot.result is None], deadline)

        pending = any(slot.result is None for slot in slots)
        error = self._router.run(operation, deadline) if pending else None
        return [slot.result or put_result(_cause(error)) for slot in slots]

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
        found = bytearray()

        def operation(session: Session) -> None:
            while len(found) < len(wanted):
                found.extend(session.lookup(wanted[len(found) : len(found) + KEYS_MAX], deadline))

        error = self._router.run(operation, deadline) if wanted else None
        found.extend(bytes(len(wanted) - len(found)))
        prefix = found.find(0)
        return Lookup(prefix if prefix >= 0 else len(found), struct.unpack(f"{len(found)}?", found), error)

    def exists(self, keys: Iterable[BlockKey], *, deadline_ms: DeadlineMs = None) -> list[bool]:
        """Whether each key is there; False where the node could not be asked (``lookup`` says why)."""
        return list(self.lookup(keys, deadline_ms=deadline_ms).found)

    def longest_prefix(self, keys: Iterable[BlockKey], *, deadline_ms: DeadlineMs = None) -> int:
        """How many keys from the first one on are there without a gap; 0 where the node could not be asked."""
        return self.lookup(keys, deadline_ms=deadline_ms).prefix

    def delete(self, keys: Iterable[BlockKey], *, deadline_ms: DeadlineMs = None) -> Deleted:
        """Delete entries; those that are not there are not an error."""
        return self._delete(checked_keys(keys), self.start_deadline(deadline_ms))

    def _delete(self, keys: Sequence[BlockKey], deadline: Deadline) -> Deleted:
        requests = list(split_requests(keys))
        counts: list[int] = []

        def operation(session: Session) -> None:
            for request in requests[len(counts) :]:
                counts.append(session.delete(request, deadline))

        error = self._router.run(operation, deadline) if requests else None
        return Deleted(sum(counts), error)

    def ping(self, *, deadline_ms: DeadlineMs = None) -> Pong | Error:
        """Ask the node for a sign of life; whatever prevents it is an Error here."""
        deadline = self.start_deadline(deadline_ms)
        pongs: list[Pong] = []

        def operation(session: Session) -> None:
            began_s = time.perf_counter()
            session.ping(deadline)
            pongs.append(Pong(session.node, session.transport, time.perf_counter() - began_s))

        error = self._router.run(operation, deadline)
        return Error(error) if error else pongs[0]

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
        for slot, place in zip(
            slots, self._router.registry.locate_doubtful([slot.buffer for slot in slots]), strict=True
        ):
            if place is not None:
                slot.result = Miss(in_doubt_error())

        def operation(session: Session) -> None:
            # Rooms decide how many entries share a frame. Entries of a namespace are mostly of one size, often far
            # below its block_bytes: what came last is the guess, and the few that are longer are asked for again.
            limit_bytes = session.entry_max_bytes
            guess_bytes = min(self._entry_bytes_seen or limit_bytes, limit_bytes)
            for slot in slots:
                slot.room_is_guess = slot.buffer is None and guess_bytes < limit_bytes
                slot.room_bytes = guess_bytes if slot.buffer is None else min(slot.buffer.nbytes, limit_bytes)
            session.get([slot for slot in slots if slot.result is None], deadline)
            longer = [slot for slot in slots if slot.result is None]
            for slot in longer:
                slot.room_is_guess, slot.room_bytes = False, limit_bytes
            if longer:
                session.get(longer, deadline)

        pending = any(slot.result is None for slot in slots)
        error = self._router.run(operation, deadline) if pending else None
        self._note_sizes(slots)
        self._delete_damaged(slots, deadline)
        return [slot.result or get_result(_cause(error)) for slot in slots]

    def _delete_damaged(self, slots: list[GetSlot], deadline: Deadline) -> None:
        """Delete what failed its checksum, so that the block can be computed and stored anew (I7).

        Best effort: nodes do not sum DRAM on every get, and keep the first bytes of a key. A reader may not delete.
        """
        damaged = [slot.key for slot in slots if isinstance(slot.result, Miss) and _is_damaged(slot.result.cause)]
        if damaged:
            self._delete(damaged, deadline)

    def _note_sizes(self, slots: list[GetSlot]) -> None:
        """Remember how long entries are, for the next guess; a batch of much shorter ones lowers it."""
        longest_bytes = max((slot.result.size_bytes for slot in slots if isinstance(slot.result, Hit)), default=0)
        if longest_bytes > self._entry_bytes_seen or 0 < longest_bytes < self._entry_bytes_seen // 4:
            self._entry_bytes_seen = longest_bytes

    def _require_open(self) -> None:
        if self._router.closed:
            raise FailedPreconditionError("the client is closed", reason="CLIENT_CLOSED", hint="make a new one")

    def _current_deriver(self) -> BlockKeyDeriver:
        grant = self._router.grant
        cached = self._deriver
        if cached is not None and cached[0] == grant.epoch:
            return cached[1]
        if not grant.salts:
            raise FailedPreconditionError(
                "these credentials hold no salt key, so block keys cannot be derived",
                reason="NO_SALT_KEY",
                hint="pass salt_key to StaticCredentials, or use an API key",
            )
        deriver = BlockKeyDeriver(grant.salts[-1].key, grant.model_fingerprint)
        self._deriver = (grant.epoch, deriver)
        return deriver


def _cause(error: SalternError | None) -> SalternError:
    """Why a slot has no result."""
    return error or InternalError("the transport left an entry without a result")


def _too_large(size_bytes: int, limit_bytes: int) -> EntryTooLargeError:
    return EntryTooLargeError(
        f"an entry of {size_bytes} bytes is above the limit of {limit_bytes}",
        hint="store smaller blocks",
        metadata={"limit_bytes": str(limit_bytes)},
    )


def _is_damaged(cause: SalternError | None) -> bool:
    """Whether an entry failed the check on this side; one that failed on the node's is gone already."""
    return isinstance(cause, DataLossError) and cause.reason == DataLossError.default_reason
