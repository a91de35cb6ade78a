"""LMCache's multi-process server with its shared-memory transfer, driven by the client of LMCache's own server bench.

That mode moves chunks of a token sequence between an engine's paged KV cache and a pool in shared memory, not bytes
under keys: one block of ours is one chunk of 256 tokens in one layer of an otherwise idle CPU "engine".
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .store import Batch, Get, Put, Store, free_port, listening

_CHUNK_BYTES: Final = 1024 * 1024
_CHUNK_TOKENS: Final = 256
_CHUNKS_MAX: Final = 128
#: Keys and values, blocks, tokens in a block, heads, size of a head: 1 MiB of float16 in a chunk, in one layer.
_SHAPE: Final = f"(2,{2 * _CHUNKS_MAX + 1},{_CHUNK_TOKENS},8,128):float16:1"
_POOL_GIB: Final = 3
_NO_BLOCK: Final = 1_000_000


class LmcacheSharedMemoryStore(Store):
    """Batches of 1 MiB only. A get is its RETRIEVE; the LOOKUP that must come before it is not counted."""

    block_sizes_bytes = (_CHUNK_BYTES,)

    def start(self) -> None:
        os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR")
        port, http_port, metrics_port = free_port(), free_port(), free_port()
        options = ["--host", "127.0.0.1", "--port", str(port), "--chunk-size", str(_CHUNK_TOKENS)]
        options += ["--http-host", "127.0.0.1", "--http-port", str(http_port), "--prometheus-port", str(metrics_port)]
        options += ["--supported-transfer-mode", "auto", "--null-block-id", str(_NO_BLOCK), "--disable-observability"]
        options += ["--l1-size-gb", str(_POOL_GIB), "--eviction-policy", "LRU", "--shm-name", f"peer-{os.getpid()}"]
        self.run_server([str(Path(sys.executable).parent / "lmcache"), "server", *options], listening(port))
        bench: Any = importlib.import_module("lmcache.cli.commands.bench.server_bench.client")
        config: Any = importlib.import_module("lmcache.cli.commands.bench.server_bench.config").BenchConfig(
            rpc_url=f"tcp://127.0.0.1:{port}",
            http_url="",
            mode="cpu",
            transfer_mode="engine_driven",
            tp_size=1,
            use_mla=False,
            num_tokens=_CHUNKS_MAX * _CHUNK_TOKENS,
            kvcache_shape_spec=_SHAPE,
            num_blocks=2 * _CHUNKS_MAX + 1,
            block_size=_CHUNK_TOKENS,
        )
        self._client = bench.ServerBenchClient(config, lambda said: None)
        self._client.start()
        self._sequence = 0
        self._request: Any = None
        self.version = f"LMCache {importlib.metadata.version('lmcache')} multi-process server, shared memory"

    def put_ways(self) -> Mapping[str, Put]:
        return {"STORE": self._put}

    def get_ways(self) -> Mapping[str, Get]:
        return {"RETRIEVE": self._get}

    def exists(self, keys: Sequence[str]) -> int:
        raise RuntimeError("this mode knows token sequences, not keys")

    def exists_one(self, key: str) -> bool:
        raise RuntimeError("this mode knows token sequences, not keys")

    def remove(self, keys: Sequence[str]) -> None:
        """Nothing to remove: the next batch is a new sequence, and the oldest ones are evicted."""
        if self._request is not None:
            self._client.end_session(self._request)
        self._sequence += 1
        self._request = self._client.create_request(self._sequence, f"request-{self._sequence}", "bench")

    def before_get(self, batch: Batch) -> None:
        found = self._client.lookup(self._request)
        if found.hit_chunks != len(batch.keys):
            raise RuntimeError(f"a lookup found {found.hit_chunks} of {len(batch.keys)} chunks: {found.error}")

    def check(self, batch: Batch) -> None:
        span = (self._request, 0, len(batch.keys) * _CHUNK_TOKENS)
        stored = self._client.compute_checksums(*span)
        self._client.zero_destination(*span)
        self.before_get(batch)
        self._get(batch)
        if stored is None or self._client.compute_checksums(*span) != stored:
            raise RuntimeError("RETRIEVE gave other bytes than were stored")

    def close(self) -> None:
        if hasattr(self, "_client"):
            self._client.close()
        super().close()

    def _put(self, batch: Batch) -> None:
        result = self._client.store(self._request, 0, len(batch.keys) * _CHUNK_TOKENS)
        if not result.succeeded:
            raise RuntimeError("a STORE failed")

    def _get(self, batch: Batch) -> Sequence[memoryview]:
        result = self._client.retrieve(self._request, 0, len(batch.keys) * _CHUNK_TOKENS)
        if not result.succeeded:
            raise RuntimeError("a RETRIEVE failed")
        return batch.views
