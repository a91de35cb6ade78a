"""How many bytes of the arena transfers may hold at a time, so that slow clients pin a bounded part of it.

A request begins while what its tenant holds is below the tenant's bound, and what all hold is below the node's; then it
holds what it needs. So a bound is exceeded by one request at most, and by one of each tenant. Who holds nothing may
always begin: no tenant waits for the slow clients of another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dataplane.core.lines import Line, Place


@dataclass(slots=True, eq=False)
class TenantFlight:
    """What the transfers of one tenant hold. The bound may be changed at any time."""

    bound_bytes: int
    held_bytes: int = 0
    line: Line = field(default_factory=Line)


@dataclass(slots=True)
class InFlight:
    """What the transfers of all tenants hold."""

    bound_bytes: int
    held_bytes: int = 0
    #: Tenants with requests in line, the longest waiting first.
    _waiting: dict[TenantFlight, None] = field(default_factory=dict)

    @property
    def is_waited_for(self) -> bool:
        """Whether any transfer waits."""
        return bool(self._waiting)

    def enter(self, flight: TenantFlight) -> Place | None:
        """Ask to begin a transfer: None if it may now, else a place in line, which must be left in any case."""
        if flight.line.is_empty and self._may_begin(flight):
            return None
        place = Place()
        flight.line.join(place)
        self._waiting[flight] = None
        return place

    def leave(self, flight: TenantFlight, place: Place) -> None:
        """The transfer has begun and holds what it needs, or has given up; then call :meth:`advance`."""
        flight.line.leave(place)
        if not flight.line:
            self._waiting.pop(flight, None)

    def hold(self, flight: TenantFlight, size_bytes: int) -> None:
        flight.held_bytes += size_bytes
        self.held_bytes += size_bytes

    def release(self, flight: TenantFlight, size_bytes: int) -> None:
        """A transfer has ended; then call :meth:`advance`."""
        flight.held_bytes -= size_bytes
        self.held_bytes -= size_bytes

    def advance(self) -> list[Place]:
        """Let in who may begin now, one of each tenant; return them."""
        admitted: list[Place] = []
        for flight in list(self._waiting):
            if flight.line.head is None or not self._may_begin(flight):
                continue
            admitted.append(flight.line.let_in())
            del self._waiting[flight]
            if flight.line:
                self._waiting[flight] = None  # behind the others
        return admitted

    def _may_begin(self, flight: TenantFlight) -> bool:
        if not flight.held_bytes:
            return True
        return flight.held_bytes < flight.bound_bytes and self.held_bytes < self.bound_bytes
