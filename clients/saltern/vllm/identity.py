"""The bindings of an engine's chains, once the weights have been read: in the background, so that nobody waits.

Until then, and for an adapter that cannot be read, there are none: no remote cache (I10).
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from saltern.errors import SalternError
from saltern.vllm.fingerprint import DIGEST_BYTES, Binding, EngineFacts, Fingerprint, bindings_of, fingerprint_of
from saltern.vllm.layout import ChainLayout
from saltern.vllm.weights import adapter_digest

logger = logging.getLogger(__name__)

#: Adapters whose bindings are kept; beyond that the oldest is read again (its digest is on disk).
_ADAPTERS_MAX: Final = 1024


class Adapter(NamedTuple):
    """A LoRA adapter as the engine has it.

    Attributes:
        path: of the folder that it was loaded from.
        number: the engine's own, another one each time that an adapter is loaded.
    """

    path: str
    number: int


class Identity:
    """What this engine's blocks are named by. Thread-safe.

    Args:
        facts: finds out all facts, which may take minutes; raises SalternError. Called once, in a thread of its own.
        layout: of the chains.
        cache_folder: where digests of files are remembered.
    """

    def __init__(self, facts: Callable[[], EngineFacts], layout: ChainLayout, cache_folder: Path | None) -> None:
        self._facts = facts
        self._layout = layout
        self._cache_folder = cache_folder
        self._lock = threading.Lock()
        #: None is the base model.
        self._known: dict[Adapter | None, tuple[Binding, ...]] = {}
        self._settled = threading.Event()
        self._generation = b""
        self.error: SalternError | None = None
        self._thread = threading.Thread(target=self._find_out, name="saltern-identity", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether the engine's own bindings are known, or found to be impossible, within ``timeout_s``."""
        return self._settled.wait(timeout_s)

    def bindings(self, adapter: Adapter | None) -> tuple[Binding, ...]:
        """The bindings of the base model (None) or with an adapter; empty where there are none (yet).

        Reads an adapter that is seen for the first time; what it is then it stays, as it does in the engine.
        """
        known = self._known.get(adapter)
        if known is not None or adapter is None or not self._known:
            return known or ()
        with self._lock:  # two requests with a new adapter: one reads
            if adapter not in self._known:
                self._add(adapter)
            return self._known[adapter]

    def renew(self) -> None:
        """From now on no block that was named so far is found again, and none that follows by another engine."""
        with self._lock:
            self._generation = secrets.token_bytes(DIGEST_BYTES)
            if self._known:
                self._known = {None: self._bind(b"")}

    def _add(self, adapter: Adapter) -> None:
        try:
            bindings = self._bind(adapter_digest(Path(adapter.path), self._cache_folder))
        except SalternError as error:
            logger.warning("no remote cache with an adapter: %s", error)
            bindings = ()
        if len(self._known) > _ADAPTERS_MAX:
            del self._known[next(known for known in self._known if known is not None)]
        self._known[adapter] = bindings

    def _bind(self, adapter: bytes) -> tuple[Binding, ...]:
        fingerprint = Fingerprint(self._fingerprint + self._generation)
        return bindings_of(fingerprint, groups=self._layout.groups, shards=self._layout.shards, adapter=adapter)

    def _find_out(self) -> None:
        try:
            self._fingerprint = fingerprint_of(self._facts())
        except SalternError as error:
            self.error = error
            logger.error("no remote cache: %s", error)
        except Exception:
            logger.exception("no remote cache: cannot tell what this engine runs")
        else:
            with self._lock:
                self._known[None] = self._bind(b"")
        self._settled.set()
