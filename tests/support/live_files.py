"""Files of a folder in which a running node adds and removes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def live_sizes(folder: Path, suffix: str) -> dict[Path, int]:
    """Bytes of each file below ``folder`` whose name ends so; what goes away meanwhile, folders too, is not there."""
    found: dict[Path, int] = {}
    for parent, _, names in os.walk(folder):  # unlike rglob, passes over a folder that has gone
        for name in names:
            path = Path(parent, name)
            if name.endswith(suffix):
                with suppress(FileNotFoundError):
                    found[path] = path.stat().st_size
    return found
