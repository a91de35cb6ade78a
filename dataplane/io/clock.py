"""The two clocks of a node, as one value, so that tests can set them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """``monotonic_ns`` orders events and times deadlines; ``unix_s`` is compared with what tokens say."""

    monotonic_ns: Callable[[], int] = time.monotonic_ns
    unix_s: Callable[[], float] = time.time
