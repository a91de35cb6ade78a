"""How much of the suite runs: under emulation every second counts, on hardware none does."""

from __future__ import annotations

import os
from typing import Final, TypeVar

T = TypeVar("T")
_EXTENT: Final = os.environ.get("SALTERN_RDMA_EXTENT", "usual")


def by_extent(*, quick: T, usual: T, full: T | None = None) -> T:
    """What a run of this extent takes; ``full`` takes what is usual unless it is told otherwise."""
    if _EXTENT == "quick":
        return quick
    return full if _EXTENT == "full" and full is not None else usual
