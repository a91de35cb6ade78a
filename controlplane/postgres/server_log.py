"""The server's log file: bounded, and quoted in the error when a start fails."""

from __future__ import annotations

from pathlib import Path

from saltern.errors import UnavailableError

_LIMIT_BYTES = 16 * 1024 * 1024
_TAIL_LINES = 5
_TAIL_BYTES = 4096

_HINTS = {
    "No space left on device": "the disk is full: free some space, or choose another --data-dir",
    "shared memory": "shared memory is short: enlarge /dev/shm, or stop other servers",
    "Read-only file system": "the file system is read-only: choose another --data-dir",
    "Permission denied": "the server's user may not use that path: check owner and mode, or choose another --data-dir",
    "Input/output error": "the disk reports errors: look at the system log",
}


class ServerLog:
    """The log of one start: what ``path`` held before is left out of errors, and moved aside once it is large."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists() and path.stat().st_size > _LIMIT_BYTES:
            path.replace(path.with_suffix(".log.1"))
        path.touch(mode=0o600)
        self._start_bytes = path.stat().st_size

    def error(self, message: str) -> UnavailableError:
        """The error that says ``message`` and quotes the last lines since this start."""
        size = self._path.stat().st_size
        with self._path.open("rb") as file:
            file.seek(max(self._start_bytes, size - _TAIL_BYTES))
            return self.error_from(message, file.read().decode(errors="replace"), f"the whole log is in {self._path}")

    @staticmethod
    def error_from(message: str, output: str, fallback_hint: str = "look at the system log") -> UnavailableError:
        """The error that says ``message``, quotes the last lines of ``output`` and hints at the cause it names."""
        tail = " | ".join(line.strip() for line in output.strip().splitlines()[-_TAIL_LINES:])
        hint = next((hint for cause, hint in _HINTS.items() if cause in output), fallback_hint)
        return UnavailableError(f"{message}: {tail or 'it printed nothing'}", reason="POSTGRES_START_FAILED", hint=hint)
