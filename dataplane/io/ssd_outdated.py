"""Partitions whose files must not be served again: entries were deleted while nobody could read the SSD folder (I12).

They are remembered beside the node's key, because the folder itself cannot be used then: a line of JSON each, durable.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from dataplane.core.ssd_books import Outdate
from dataplane.io.ssd_files import Files
from saltern.names import TenantId

OUTDATED_FILE: Final = "ssd-outdated"


class OutdatedPartitions:
    """The list in ``folder``. Blocks; one thread at a time.

    Args:
        folder: outside of the SSD folder, on another device if there is one.
    """

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self.path = folder / OUTDATED_FILE
        self._files = files or Files()

    def add(self, outdate: Outdate) -> None:
        """Returns once it is durable. Raises OSError."""
        lines = self._read()
        lines[json.dumps([outdate.tenant, outdate.storage_uid, outdate.epoch])] = None
        self._files.write_small(self.path, "".join(f"{line}\n" for line in lines).encode())

    def all(self) -> list[Outdate]:
        """What was added and not cleared. Raises OSError; ValueError: the file is not what was written."""
        found = []
        for line in self._read():
            match json.loads(line) if line.startswith("[") and line.endswith("]") else None:
                case [str(tenant), str(storage_uid), int(epoch)]:
                    found.append(Outdate(TenantId(tenant), storage_uid, epoch))
                case _:
                    raise ValueError(f"{self.path} is damaged")
        return found

    def clear(self) -> None:
        """Forget all. Raises OSError."""
        self._files.unlink(self.path)

    def _read(self) -> dict[str, None]:
        try:
            return dict.fromkeys(self.path.read_text().splitlines())
        except FileNotFoundError:
            return {}
