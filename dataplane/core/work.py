"""What the event loop's time is spent on, in one unit: bytes moved, and everything else as if it were bytes.

The node is one event loop, so what tenants share is its time. A byte received, copied or sent is one unit; the figures
below are what the rest was measured to take, at 2.5 GB/s.
"""

from __future__ import annotations

from typing import Final

#: Any turn, even one that finds nothing to do: 2 us.
TURN_WORK: Final = 4 * 1024
#: Any request: a frame read, decoded, checked at the gate, answered: 25 us.
REQUEST_WORK: Final = 64 * 1024
#: A key of a lookup: 0.2 us.
LOOKUP_KEY_WORK: Final = 512
#: A key of a put, a get or a delete, found or not: 1.5 us.
ENTRY_WORK: Final = 4 * 1024
