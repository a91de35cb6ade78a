"""Who may give work to the RDMA device next, and how much of it is under way: bounds and fair shares, no I/O.

The device carries out what it is given in order, so what waits must wait here, where tenants have weights. A *claim*
is one chain of work requests: it waits, is let in, and is over when its completion has come or its queue pair is gone.

- A claim is let in while all claims cost less than the node's bound and its tenant's less than three quarters of it.
  So the bounds are exceeded by one claim at most, and by one of each tenant.
- Who holds nothing is always let in at once: sessions whose clients have vanished hold work until the device gives up
  on them, seconds later, and must not hold up another tenant (I2, I5).
- Among those that may be let in the smallest start tag is first, and what a claim costs, divided by its tenant's
  weight, moves the tag on (start-time fair queueing, as for turns in :mod:`dataplane.core.fair_queue`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

#: What a work request costs besides its bytes: a device spends about as long on it as on so many of them.
REQUEST_COST: Final = 4096
#: Tags are integers; this many units of virtual time are one unit of cost at weight 1.
_SCALE: Final = 1 << 10


def cost_of(requests: int, size_bytes: int) -> int:
    """What a chain of so many work requests and bytes costs, at least 1."""
    return max(1, size_bytes + requests * REQUEST_COST)


class Sharer:
    """One tenant's part of the device.

    Attributes:
        weight: relative claim, at least 1; may be changed at any time and counts from the next claim on.
        held: cost of its claims that are under way.
    """

    __slots__ = ("_line", "_tag", "held", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.held = 0
        self._tag = 0
        self._line: deque[Claim] = deque()

    @property
    def waiting(self) -> int:
        """Claims that wait."""
        return len(self._line)


class Claim:
    """One chain's place.

    Attributes:
        is_waiting: False once it was let in, or left.
        wake: called by the shell when it waits no longer.
    """

    __slots__ = ("_is_held", "_sharer", "cost", "is_waiting", "wake")

    def __init__(self, sharer: Sharer, cost: int, wake: Callable[[], None]) -> None:
        self.cost: Final = cost
        self.is_waiting = True
        self.wake = wake
        self._is_held = False
        self._sharer = sharer


class DeviceShare:
    """The claims of all tenants on one device.

    Args:
        bound: cost that all claims under way may reach; see above.
    """

    __slots__ = ("_bound", "_now", "_waiting", "held")

    def __init__(self, bound: int) -> None:
        self.held = 0
        self._bound = bound
        #: Virtual time: the latest start tag of a claim that was let in.
        self._now = 0
        #: Sharers with claims in line, in order of arrival.
        self._waiting: dict[Sharer, None] = {}

    def enter(self, sharer: Sharer, cost: int, wake: Callable[[], None]) -> Claim:
        """Ask to give the device work of ``cost``; the claim may be let in already. :meth:`leave` it in any case."""
        claim = Claim(sharer, cost, wake)
        if not sharer._line and self._may_begin(sharer):
            self._let_in(claim)
        else:
            sharer._line.append(claim)
            self._waiting[sharer] = None
        return claim

    def leave(self, claim: Claim) -> list[Claim]:
        """The claim's work is over, or it gives up; idempotent. Returns the claims that are let in by that."""
        sharer = claim._sharer
        if claim.is_waiting:
            claim.is_waiting = False
            sharer._line.remove(claim)
            if not sharer._line:
                del self._waiting[sharer]
        elif claim._is_held:
            claim._is_held = False
            sharer.held -= claim.cost
            self.held -= claim.cost
        return self._advance()

    def _advance(self) -> list[Claim]:
        admitted: list[Claim] = []
        while ready := [sharer for sharer in self._waiting if self._may_begin(sharer)]:
            sharer = min(ready, key=lambda each: each._tag)  # the first of equals has waited longest
            claim = sharer._line.popleft()
            if not sharer._line:
                del self._waiting[sharer]
            self._let_in(claim)
            admitted.append(claim)
        return admitted

    def _may_begin(self, sharer: Sharer) -> bool:
        if not sharer.held:
            return True
        return sharer.held < self._bound * 3 // 4 and self.held < self._bound

    def _let_in(self, claim: Claim) -> None:
        sharer = claim._sharer
        claim.is_waiting, claim._is_held = False, True
        sharer.held += claim.cost
        self.held += claim.cost
        # Whoever comes back from idleness has saved up nothing.
        start = max(sharer._tag, self._now)
        self._now = start
        sharer._tag = start + claim.cost * _SCALE // sharer.weight
