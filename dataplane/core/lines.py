"""A line of requests that wait, first come first served, and are let in one at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from saltern.errors import SalternError


def _nobody() -> None:
    """Nobody waits for the place yet."""


class Place:
    """One request's place in a line.

    Attributes:
        operations, payload_bytes: what the request costs, as far as it is known before it begins.
        deadline_ns: until when it may wait; None for as long as it takes.
        is_waiting: False once it was let in or refused.
        refusal: why it was refused, or None.
        wake: called by the shell when it waits no longer.
    """

    __slots__ = ("deadline_ns", "is_waiting", "operations", "payload_bytes", "refusal", "wake")

    def __init__(self, operations: int = 0, payload_bytes: int = 0, deadline_ns: int | None = None) -> None:
        self.operations = operations
        self.payload_bytes = payload_bytes
        self.deadline_ns = deadline_ns
        self.is_waiting = True
        self.refusal: SalternError | None = None
        self.wake: Callable[[], None] = _nobody

    def take_refusal(self) -> SalternError | None:
        """Return why it was refused and forget it: kept, the error's traceback would lead back to it for ever."""
        refusal, self.refusal = self.refusal, None
        return refusal


class Line:
    """Places in order. Whoever was let in holds up the next until :meth:`leave`: only then is known what it costs."""

    __slots__ = ("_inside", "_places")

    def __init__(self) -> None:
        self._places: deque[Place] = deque()
        self._inside: Place | None = None

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places)

    @property
    def is_empty(self) -> bool:
        """Whether a request that comes now is the first."""
        return not self._places and self._inside is None

    @property
    def head(self) -> Place | None:
        """The one to be let in next; None if there is none or another has just been let in."""
        return self._places[0] if self._places and self._inside is None else None

    def join(self, place: Place) -> None:
        self._places.append(place)

    def let_in(self) -> Place:
        """Let the head in."""
        self._inside = place = self._places.popleft()
        place.is_waiting = False
        return place

    def refuse(self, refusal: SalternError) -> Place:
        """Send the head away."""
        place = self._places.popleft()
        place.is_waiting, place.refusal = False, refusal
        return place

    def leave(self, place: Place) -> None:
        """The request has begun, or has given up; idempotent."""
        if self._inside is place:
            self._inside = None
        elif place.is_waiting:
            place.is_waiting = False
            self._places.remove(place)
