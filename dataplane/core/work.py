"""What the event loop's time is spent on, in one unit: bytes moved, and everything else as if it were bytes.

The node is one event loop, so what tenants share is its time. A byte received, copied or sent is one unit; the figures
below are what the rest was measured to take, at 2.5 GB/s.
"""

from __future__ import annotations

from typing import Final

#: What a tenant of the default weight that left its share unused may have done before those that did not: 0.8 ms, a
#: request or two.
HEAD_START_WORK: Final = 2 * 1024 * 1024
#: Any turn, even one that finds nothing to do: 2 us.
TURN_WORK: Final = 4 * 1024
#: Any request: a frame read, decoded, checked at the gate, answered: 25 us.
REQUEST_WORK: Final = 64 * 1024
#: A token to verify: 0.4 ms.
TOKEN_WORK: Final = 1024 * 1024
#: A TLS handshake with a P-256 key: 0.9 ms.
HANDSHAKE_WORK: Final = 2 * 1024 * 1024
#: A key of a lookup: 0.05 us.
LOOKUP_KEY_WORK: Final = 128
#: A key of a get, looked up, touched and pinned: 1.5 us.
PIN_WORK: Final = 4 * 1024
#: The same, told hit from miss: 0.5 us; and a hit made ready to be sent and unpinned: 1 us.
SORT_WORK: Final = 1024
SEND_WORK: Final = 2 * 1024
#: A buffer of a reply, beside its bytes: 0.4 us.
PART_WORK: Final = 1024
#: A key of a delete: 3.5 us.
DELETE_WORK: Final = 8 * 1024
#: An entry admitted and published: 10 us.
PUT_WORK: Final = 24 * 1024
#: An entry touched after its put: 0.5 us.
TOUCH_WORK: Final = 1024
