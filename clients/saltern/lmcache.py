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
import os
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
from saltern.errors import FailedPreconditionError, InvalidArgumentError
from saltern.keys import BlockHash, BlockKey
from saltern.results import Error, Hit, Pong, Refused
from saltern.tls import client_tls_from_environment

_THREADS: Final = 4
_DEADLINE_MS: Final = 2000.0

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
            InvalidArgumentError: an option is missing.
            FailedPreconditionError: LMCache is set up so that chunks could not be found again, or not be read.
            SalternError: the key cannot be read or exchanged. LMCache goes on without remote storage, and tries again.
        """
        prefix = f"remote_storage_plugin.{context.plugin_name or 'saltern'}."
        extra = context.config.extra_config or {}

        def option(name: str, variable: str) -> str:
            value = extra.get(prefix + name) or os.environ.get(variable, "")
            if not value:
                raise InvalidArgumentError(
                    f"{prefix}{name} is not set", reason="LMCACHE_OPTION_MISSING", hint=f"set it, or {variable}"
                )
            return str(value)

        _check(context.config)
        secret = os.environ.get("SALTERN_API_KEY", "")
        key = ApiKey(secret) if secret else read_api_key(Path(option("api_key_file", "SALTERN_API_KEY_FILE")))
        client = Client(
            control=option("control", "SALTERN_CONTROL"),
            api_key=key.reveal(),
            namespace=option("namespace", "SALTERN_NAMESPACE"),
            deadline_ms=float(extra.get(prefix + "deadline_ms", _DEADLINE_MS)),
            tls=client_tls_from_environment(),
        )
        try:
            return SalternConnector(client, context)
        except BaseException:
            client.close()
            raise


class SalternConnector(RemoteConnector):
    """Stores and loads chunks of one namespace; whatever is in the way of a load is a miss."""

    def __init__(self, client: Client, context: ConnectorContext) -> None:
        super().__init__(context.config, context.metadata)
        self._client = client
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
        return self._client.longest_prefix(self._keys(keys))

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
            return await asyncio.shield(asyncio.wrap_future(reading))
        except asyncio.CancelledError:
            reading.add_done_callback(_give_back)  # the thread goes on, and nobody takes what it brings
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
        """Store chunks; LMCache gives the memory back. Raises the first refusal, which LMCache logs and counts."""
        await self._call(self._write, keys, memory_objs)

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        return 0 if isinstance(await self._call(self._client.ping), Pong) else 1

    async def list(self) -> Names:
        """Nothing: what a key was made of cannot be told from it."""
        return []

    async def close(self) -> None:
        self._client.close()  # ends what the threads wait for
        self._threads.shutdown(wait=True)

    # ---- inside --------------------------------------------------------------------------------------------------

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run in a thread. Shielded: while it runs it uses memory that the caller gives back when this is over."""
        return await asyncio.shield(asyncio.wrap_future(self._threads.submit(function, *arguments)))

    def _read(self, keys: Sequence[Any]) -> Many:
        rooms = [self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt) for _ in keys]
        given = [number for number, room in enumerate(rooms) if room is not None]
        try:
            results = self._client.get_into(
                self._keys([keys[number] for number in given]), [_bytes_of(rooms[number]) for number in given]
            )
            for number, result in zip(given, results, strict=True):
                if not (isinstance(result, Hit) and self._fits(result.size_bytes)):
                    _release([rooms[number]])
                    rooms[number] = None
                else:
                    self.reshape_partial_chunk(rooms[number], result.size_bytes)
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
    if config.pre_caching_hash_algorithm == "builtin" and os.environ.get("PYTHONHASHSEED", "random") == "random":
        wrong = "chunk hashes differ in every process: set pre_caching_hash_algorithm to sha256_cbor"
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
