"""The driver of one peer: a request in each line of standard input, its answer in a line of standard output.

``{"do": "put", "block_bytes": 65536}`` is answered ``{"seconds": ..., "client_cpu_s": ..., "server_cpu_s": ...}``, or
``{"error": "..."}``. The first line out says ``{"version": ...}`` when the peer is ready. Ends with its input.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, TextIO

from .measure import Measure
from .store import Store

_STORES: Final = {
    "redis": (".resp", "RespStore"),
    "valkey": (".resp", "ValkeyStore"),
    "mooncake": (".mooncake", "MooncakeStore"),
    "lmcache": (".lmcache", "LmcacheStore"),
    "lmcache-shm": (".lmcache_shm", "LmcacheSharedMemoryStore"),
}


def main(name: str, batch_bytes: int) -> None:
    # Libraries print to standard output; what they say goes to the log, and the answers keep the pipe to themselves.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers, tempfile.TemporaryDirectory() as folder:
        os.dup2(2, 1)
        module, kind = _STORES[name]
        store: Store = getattr(importlib.import_module(module, __package__), kind)(Path(folder))
        try:
            try:
                store.start()
                measure = Measure(store, batch_bytes)
            except Exception as error:
                _answer(answers, {"error": _words(error)})
                return
            _answer(answers, {"version": store.version})
            for line in sys.stdin:
                request = json.loads(line)
                try:
                    answer = getattr(measure, request.pop("do"))(**request)
                except Exception as error:  # whatever a peer does wrong is an answer
                    answer = {"error": _words(error)}
                _answer(answers, answer)
        finally:
            store.close()


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
