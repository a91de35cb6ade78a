"""Certificates that are replaced while a server runs.

The files are looked at when somebody connects, at most once a second. Connections that are open go on; the next one
gets the new certificate. Files that cannot be used change nothing: the old certificate stays, and the log says why.
"""

from __future__ import annotations

import ssl
import threading
from time import monotonic
from typing import Any, Final, Protocol

from saltern.errors import SalternError
from saltern.tls import ServerMaterial, ServerTls, file_stamps, server_context

CHECK_INTERVAL_S: Final = 1.0


class EventLog(Protocol):
    """Where reloads are reported; a structlog logger is one."""

    def info(self, event: str, /, **fields: Any) -> object: ...
    def error(self, event: str, /, **fields: Any) -> object: ...


class ReloadingTls:
    """The certificate of a server as its files say it now. Thread-safe: gRPC asks from threads of its own.

    Args:
        files: read at once.
        interval_s: the files are looked at no more often than this.

    Raises:
        SalternError: the files cannot be used, see :meth:`ServerTls.read`.
    """

    def __init__(self, files: ServerTls, log: EventLog, *, interval_s: float = CHECK_INTERVAL_S) -> None:
        self.files: Final = files
        self._log = log
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._stamp = file_stamps(self.files.files)
        self._material = files.read()
        self._context = server_context(self._material)
        self._looked_s = monotonic()

    @property
    def requires_client_certificate(self) -> bool:
        return self.files.client_ca is not None

    def current(self) -> ServerMaterial:
        """What to show to whoever connects now."""
        with self._lock:
            self._look()
            return self._material

    def context(self) -> ssl.SSLContext:
        """The same, as the context of a wire door."""
        with self._lock:
            self._look()
            return self._context

    def _look(self) -> None:
        now_s = monotonic()
        if now_s - self._looked_s < self._interval_s:
            return
        self._looked_s = now_s
        stamp = file_stamps(self.files.files)
        if stamp == self._stamp:
            return
        # Noted before reading: files that change during that are read again, broken ones are reported once.
        self._stamp = stamp
        try:
            material = self.files.read()
            context = server_context(material)
        except SalternError as error:
            self._log.error(
                "changed TLS files cannot be used; the old certificate stays",
                reason=error.reason,
                message=error.message,
                expires=self._material.identity.expires_at.isoformat(),
            )
            return
        self._material, self._context = material, context
        identity = material.identity
        self._log.info("TLS certificate", serial=f"{identity.serial:x}", expires=identity.expires_at.isoformat())
