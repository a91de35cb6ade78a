"""LMCache's remote storage plug-in: chunks of one engine's tenant, in Saltern. Imported by LMCache only.

::

    remote_storage_plugins: ["saltern"]
    pre_caching_hash_algorithm: sha256_cbor
    extra_config:
      remote_storage_plugin.saltern.module_path: saltern.lmcache
      remote_storage_plugin.saltern.class_name: SalternAdapter
      remote_storage_plugin.saltern.namespace: llama

One tenant for each engine: nothing of a request that reaches a plug-in says who made it. What decides over a chunk's
bytes beyond LMCache's key (weights, attention backend) is the namespace's, whose model fingerprint is in every key.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from saltern.admin_client import ApiKey, read_api_key
from saltern.client import Client
from saltern.errors import FailedPreconditionError, InvalidArgumentError, SalternError
from saltern.keys import BlockHash, BlockKey
from saltern.results import Error, Hit, Miss, Pong, Refused
from saltern.tls import client_tls_from_environment

logger = logging.getLogger(__name__)

_THREADS: Final = 4
_DEADLINE_MS: Final = 2000.0
#: The engine's scheduler waits for lookups.
_LOOKUP_DEADLINE_MS: Final = 100.0
#: Of hashes that are the same in every process, and that nobody can choose.
_HASH_ALGORITHMS: Final = ("sha256_cbor", "sha256_cbor_64bit")
#: A node that is gone fails every call: each reason is logged again after this time at the earliest.
_QUIET_S: Final = 60.0

T = TypeVar("T")
#: Keys or memory objects of LMCache, and names of keys. Not spelled out below, where `list` is a method.
Many: TypeAlias = list[Any]
Names: TypeAlias = list[str]


class SalternAdapter(ConnectorAdapter):
    """What LMCache makes the connector by."""

    def __init__(self) -> None:
        super().__init__("plugin://saltern")

    def create_connector(self, context: ConnectorContext) -> SalternConnector:
        """Open a client with the options below ``remote_storage_plugin.NAME.``, or the environment's.

        Raises:
            InvalidArgumentError: an option is missing or makes no sense.
            FailedPreconditionError: LMCache is set up so that chunks could not be found again, or not be read.
            SalternError: the key cannot be read or exchanged. LMCache logs it and goes on without remote storage; its
                health monitor tries again.
        """
        prefix = f"remote_storage_plugin.{context.plugin_name or 'saltern'}."
        extra = context.config.extra_config or {}

        def given(name: str, variable: str) -> str:
            return str(extra.get(prefix + name) or os.environ.get(variable, ""))

        def option(name: str, variable: str) -> str:
            value = given(name, variable)
            if not value:
                raise InvalidArgumentError(
                    f"{prefix}{name} is not set", reason="LMCACHE_OPTION_MISSING", hint=f"set it, or {variable}"
                )
            return value

        def milliseconds(name: str, default: float) -> float:
            value = extra.get(prefix + name, default)
            try:
                if 0 < (number := float(value)) < math.inf:
                    return number
            except (TypeError, ValueError):
                pass
            raise InvalidArgumentError(
                f"{prefix}{name} is {value!r}", reason="LMCACHE_OPTION_INVALID", hint="give milliseconds, above 0"
            )

        _check(context.config)
        deadline_ms = milliseconds("deadline_ms", _DEADLINE_MS)
        lookup_deadline_ms = milliseconds("lookup_deadline_ms", _LOOKUP_DEADLINE_MS)
        secret, key_file = os.environ.get("SALTERN_API_KEY", ""), given("api_key_file", "SALTERN_API_KEY_FILE")
        if secret and not key_file:
            key = ApiKey(secret)
        else:
            key = read_api_key(Path(option("api_key_file", "SALTERN_API_KEY_FILE")))
        client = Client(
            control=option("control", "SALTERN_CONTROL"),
            api_key=key.reveal(),
            namespace=option("namespace", "SALTERN_NAMESPACE"),
            deadline_ms=deadline_ms,
            tls=client_tls_from_environment(),
        )
        try:
            return SalternConnector(client, context, lookup_deadline_ms=lookup_deadline_ms)
        except BaseException:
            client.close()
            raise


class SalternConnector(RemoteConnector):
    """Stores and loads chunks of one namespace; whatever is in the way of a load is a miss, and logged."""

    def __init__(self, client: Client, context: ConnectorContext, *, lookup_deadline_ms: float) -> None:
        super().__init__(context.config, context.metadata)
        self._client = client
        self._lookup_deadline_ms = lookup_deadline_ms
        #: When a reason was logged last, on the clock of ``time.monotonic``.
        self._told_at_s: dict[str, float] = {}
        self._memory = context.local_cpu_backend
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="saltern-lmcache")
        layout = [version("lmcache"), str(self.meta_fmt), self.full_chunk_size_bytes, self.single_token_size]
        self._layout = [
            *layout,
            *([str(dtype), *shape] for dtype, shape in zip(self.meta_dtypes, self.meta_shapes, strict=True)),
        ]
        if client.block_bytes < self.full_chunk_size_bytes:
            raise FailedPreconditionError(
                f"entries of namespace {client.namespace!r} hold {client.block_bytes} bytes, and LMCache's chunks have "
                f"{self.full_chunk_size_bytes}",
                reason="LMCACHE_CHUNK_TOO_LARGE",
                hint=f"make one with --block-bytes {self.full_chunk_size_bytes}",
            )

    async def exists(self, key: Any) -> bool:
        return await self._call(self.exists_sync, key)

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Many) -> int:
        """How many keys from the first one on are there."""
        found = self._client.lookup(self._keys(keys), deadline_ms=self._lookup_deadline_ms)
        if found.error is not None:
            self._tell("lookup", found.error)
        return found.prefix

    async def batched_async_contains(self, lookup_id: str, keys: Many, pin: bool = False) -> int:
        return await self._call(self.batched_contains, keys)

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Many) -> Many:
        """A memory object for each key, or None."""
        reading = self._threads.submit(self._read, keys)
        try:
            return await asyncio.wrap_future(reading)
        except asyncio.CancelledError:
            reading.add_done_callback(_give_back)  # a thread that has begun goes on, and nobody takes what it brings
            raise

    async def batched_get_non_blocking(self, lookup_id: str, keys: Many) -> Many:
        """As ``batched_get``, up to the first that is not there."""
        found = await self.batched_get(keys)
        whole = found.index(None) if None in found else len(found)
        _release(found[whole:])
        return found[:whole]

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Many, memory_objs: Many) -> None:
        """Store chunks; LMCache gives its hold of the memory back. Raises the first refusal, which LMCache logs."""
        writing = self._threads.submit(self._write, keys, memory_objs)
        # A thread that has begun goes on where the caller is cancelled: without a hold of its own it would send what
        # the memory is used for next, under these keys.
        for memory_obj in memory_objs:
            memory_obj.ref_count_up()
        writing.add_done_callback(lambda _: _release(memory_objs))
        await asyncio.wrap_future(writing)

    def remove_sync(self, key: Any) -> bool:
        """Delete a chunk, for every engine of the tenant; returns whether it was there."""
        deleted = self._client.delete(self._keys([key]))
        if deleted.error is not None:
            self._tell("delete", deleted.error)
        return deleted.count > 0

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        return 0 if isinstance(await self._call(self._client.ping), Pong) else 1

    async def list(self) -> Names:
        """Nothing: what a key was made of cannot be told from it."""
        return []

    async def close(self) -> None:
        self._client.close()  # ends what the threads wait for
        await asyncio.to_thread(self._threads.shutdown)

    # ---- inside --------------------------------------------------------------------------------------------------

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(self._threads.submit(function, *arguments))

    def _read(self, keys: Sequence[Any]) -> Many:
        rooms: Many = []
        try:
            for _ in keys:
                # No room is a miss. To wait for some would be to wait for ever where this batch has taken it all.
                room = self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False)
                rooms.append(room)
            given = [number for number, room in enumerate(rooms) if room is not None]
            results = self._client.get_into(
                self._keys([keys[number] for number in given]), [_bytes_of(rooms[number]) for number in given]
            )
            for number, result in zip(given, results, strict=True):
                if isinstance(result, Hit) and self._fits(result.size_bytes):
                    self.reshape_partial_chunk(rooms[number], result.size_bytes)
                    continue
                _release([rooms[number]])
                rooms[number] = None
                if isinstance(result, Error):
                    self._tell("load", result.error)
                elif isinstance(result, Miss) and result.cause is not None:
                    self._tell("load", result.cause)
        except BaseException:
            _release(rooms)
            raise
        return rooms

    def _write(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        views = [_bytes_of(memory_obj) for memory_obj in memory_objs]
        named = zip(self._keys(keys), views, strict=True)
        items = [(key, view) for key, view in named if self._fits(view.nbytes)]
        for result in self._client.put_many(items):
            if isinstance(result, Refused | Error):
                raise result.error

    def _tell(self, what: str, error: SalternError) -> None:
        """Log why something was not done."""
        now_s = time.monotonic()
        if now_s - self._told_at_s.get(error.reason, -math.inf) >= _QUIET_S:
            self._told_at_s[error.reason] = now_s
            logger.warning("%s not made: %s", what, error)

    def _fits(self, size_bytes: int) -> bool:
        """Whether a chunk is a whole one, or one that LMCache can tell the shape of by its length."""
        whole = size_bytes == self.full_chunk_size_bytes
        return whole or (len(self.meta_shapes) == 1 and size_bytes % self.single_token_size == 0)

    def _keys(self, keys: Sequence[Any]) -> Sequence[BlockKey]:
        """Keys under the tenant's salt (I1) of all that LMCache's key says, by fields, and of the layout."""
        hashes = []
        for key in keys:
            names = [key.model_name, key.world_size, key.worker_id, key.chunk_hash_hex, str(key.dtype), key.tags]
            hashes.append(BlockHash(sha256(msgspec.json.encode([self._layout, names])).digest()))
        return self._client.block_keys(hashes)


def _check(config: Any) -> None:
    """Raise FailedPreconditionError where chunks could not be found again, or are not what the shapes say."""
    wrong = ""
    if config.pre_caching_hash_algorithm not in _HASH_ALGORITHMS:
        wrong = (
            f"{config.pre_caching_hash_algorithm} hashes differ between processes, or prompts can be made to collide: "
            "set pre_caching_hash_algorithm to sha256_cbor"
        )
    elif config.use_layerwise:
        wrong = "entries are whole chunks: set use_layerwise to false"
    elif config.remote_serde not in (None, "naive"):
        wrong = "entries are chunks as they lie in memory: set remote_serde to naive"
    if wrong:
        what, _, hint = wrong.partition(": ")
        raise FailedPreconditionError(f"no remote storage: {what}", reason="LMCACHE_SETTING_NOT_SUPPORTED", hint=hint)


def _bytes_of(memory_obj: Any) -> memoryview:
    view = memoryview(memory_obj.byte_array)
    return view if view.format == "B" else view.cast("B")


def _release(memory_objs: Sequence[Any]) -> None:
    for memory_obj in memory_objs:
        if memory_obj is not None:
            memory_obj.ref_count_down()


def _give_back(reading: Future[list[Any]]) -> None:
    if not reading.cancelled() and reading.exception() is None:
        _release(reading.result())
