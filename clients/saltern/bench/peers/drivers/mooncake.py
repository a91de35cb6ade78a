"""Mooncake Store over TCP: a master, a process that lends its memory, and this process as a pure client.

Its data port listens on every interface, so it only starts where the network has nothing but loopback.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .store import Batch, Get, Put, Store, free_port, listening

_MIB: Final = 1024 * 1024
_SEGMENT_BYTES: Final = 2048 * _MIB
_LOCAL_BUFFER_BYTES: Final = 64 * _MIB
#: Keys in one call where a batch is cut: larger calls overran the client's TCP queue in some runs.
_CALL_KEYS: Final = 256
#: Lends memory until its standard input closes.
_SEGMENT_CODE: Final = """
import pathlib, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 16 << 20, "tcp", "", sys.argv[2])
if code == 0:
    pathlib.Path("segment-ready").touch()
    sys.stdin.read()
sys.exit(f"setup answered {code}")
"""


class MooncakeStore(Store):
    """Zero-copy batches, which are its fastest interface; values are read into registered memory."""

    def start(self) -> None:
        interfaces = [name for _, name in socket.if_nameindex() if name != "lo"]
        if interfaces:
            raise RuntimeError(f"its data port would listen on {', '.join(interfaces)}: it needs a private network")
        os.environ.setdefault("GLOG_minloglevel", "2")
        port, metrics_port = free_port(), free_port()
        master = f"127.0.0.1:{port}"
        options = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", "--enable_metric_reporting=false"]
        options += [f"--metrics_port={metrics_port}", "--metrics_host=127.0.0.1", "--logtostderr=1"]
        self.run_server([str(Path(sys.executable).parent / "mooncake_master"), *options], listening(port))
        segment = [sys.executable, "-c", _SEGMENT_CODE, str(_SEGMENT_BYTES), master]
        self.run_server(segment, (self.folder / "segment-ready").exists)
        module: Any = importlib.import_module("mooncake.store")
        self._client = module.MooncakeDistributedStore()
        _require(self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, _LOCAL_BUFFER_BYTES, "tcp", "", master), "setup")
        self.version = f"Mooncake {importlib.metadata.version('mooncake-transfer-engine-non-cuda')}, zero-copy over TCP"

    def register(self, area: memoryview) -> None:
        _require(self._client.register_buffer(_address(area), area.nbytes), "register_buffer")

    def put_ways(self) -> Mapping[str, Put]:
        return {"batch_put_from": self._put, f"batch_put_from, {_CALL_KEYS} keys": self._put_cut}

    def get_ways(self) -> Mapping[str, Get]:
        return {"batch_get_into": self._get, f"batch_get_into, {_CALL_KEYS} keys": self._get_cut}

    def exists(self, keys: Sequence[str]) -> int:
        return sum(code == 1 for code in self._client.batch_is_exist(list(keys)))

    def exists_one(self, key: str) -> bool:
        return bool(self._client.is_exist(key) == 1)

    def remove(self, keys: Sequence[str]) -> None:
        # A key that was just read or asked for is leased and would be refused; this takes leased ones too.
        self._client.batch_remove(list(keys), True)

    def close(self) -> None:
        if hasattr(self, "_client"):
            self._client.close()
        super().close()

    def _put(self, batch: Batch) -> None:
        sizes = [batch.block_bytes] * len(batch.keys)
        codes = self._client.batch_put_from(batch.keys, batch.addresses, sizes)
        _require_all(codes, 0)

    def _put_cut(self, batch: Batch) -> None:
        for part in batch.split(_CALL_KEYS):
            self._put(part)

    def _get(self, batch: Batch) -> Sequence[memoryview]:
        sizes = [batch.block_bytes] * len(batch.keys)
        codes = self._client.batch_get_into(batch.keys, batch.addresses, sizes)
        _require_all(codes, batch.block_bytes)
        return batch.views

    def _get_cut(self, batch: Batch) -> Sequence[memoryview]:
        for part in batch.split(_CALL_KEYS):
            self._get(part)
        return batch.views


def _require(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"{what} answered {code}")


def _require_all(codes: Sequence[int], expected: int) -> None:
    wrong = [code for code in codes if code != expected]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(codes)} keys of one call failed, the first with code {wrong[0]}")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
