"""LMCache's standalone server (``lm://``), in the protocol of its own client classes over one blocking socket."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .store import Batch, Get, Put, Store, free_port, listening

#: Bytes of one element in the shape that a block is sent with: bfloat16.
_ELEMENT_BYTES: Final = 2
_ROW: Final = 512


class LmcacheStore(Store):
    """``lmcache_server``: values received into memory that exists already, as its own connector does."""

    has_batches = False

    def start(self) -> None:
        os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR")
        port = free_port()
        server = Path(sys.executable).parent / "lmcache_server"
        self.run_server([str(server), "127.0.0.1", str(port), "cpu"], listening(port))
        self._torch: Any = importlib.import_module("torch")
        self._protocol: Any = importlib.import_module("lmcache.v1.protocol")
        self._format: Any = importlib.import_module("lmcache.v1.memory_management").MemoryFormat.KV_2LTD
        self._key_type: Any = importlib.import_module("lmcache.utils").CacheEngineKey
        self._reply = memoryview(bytearray(self._protocol.ServerMetaMessage.packlength()))
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.version = f"lmcache_server {importlib.metadata.version('lmcache')}, its protocol over one socket"

    def put_ways(self) -> Mapping[str, Put]:
        return {"PUT each, EXIST at the end": self._put}

    def get_ways(self) -> Mapping[str, Get]:
        return {"GET each": self._get}

    def exists(self, keys: Sequence[str]) -> int:
        return sum(self.exists_one(key) for key in keys)

    def exists_one(self, key: str) -> bool:
        self._send(self._protocol.ClientCommand.EXIST, key, 0)
        return bool(self._receive_reply().code == self._protocol.ServerReturnCode.SUCCESS)

    def remove(self, keys: Sequence[str]) -> None:
        """The protocol removes nothing; a put replaces."""

    def close(self) -> None:
        if hasattr(self, "_socket"):
            self._socket.close()
        super().close()

    def _put(self, batch: Batch) -> None:
        for key, view in zip(batch.keys, batch.views, strict=True):
            self._send(self._protocol.ClientCommand.PUT, key, view.nbytes)
            self._socket.sendall(view)
        # A put has no reply; the server answers this only after it has taken them all.
        if not self.exists_one(batch.keys[-1]):
            raise RuntimeError("the last put of a batch is not there")

    def _get(self, batch: Batch) -> Sequence[memoryview]:
        for key, view in zip(batch.keys, batch.views, strict=True):
            self._send(self._protocol.ClientCommand.GET, key, 0)
            reply = self._receive_reply()
            if reply.length != view.nbytes:
                raise RuntimeError(f"a get answered with {reply.length} bytes instead of {view.nbytes}")
            self._receive(view)
        return batch.views

    def _send(self, command: object, key: str, size_bytes: int) -> None:
        shape = self._torch.Size([2, 1, size_bytes // (2 * _ROW * _ELEMENT_BYTES), _ROW])
        name = self._key_type("model", 1, 0, int(key, 16), self._torch.bfloat16)
        meta = self._protocol.ClientMetaMessage(command, name, size_bytes, self._format, self._torch.bfloat16, shape)
        self._socket.sendall(meta.serialize())

    def _receive_reply(self) -> Any:
        self._receive(self._reply)
        return self._protocol.ServerMetaMessage.deserialize(bytes(self._reply))

    def _receive(self, view: memoryview) -> None:
        received = 0
        while received < view.nbytes:
            step = self._socket.recv_into(view[received:])
            if step == 0:
                raise EOFError("lmcache_server hung up")
            received += step
