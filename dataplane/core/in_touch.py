"""When the node was last in touch with its control plane: the last moment at which it went by the newest policy.

A report that is answered is not enough: the line that brings policies may have died silently, and the node would serve
an old one for ever. An answer says which policy is the newest; it counts, as of when the report was *sent*, once the
node goes by that policy.
"""

from __future__ import annotations


class InTouch:
    """Times are seconds of any one clock.

    Args:
        since_s: from when the node counts as in touch at first.
    """

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self._pending: tuple[float, int] | None = None

    def answered(self, sent_s: float, newest_version: int, applied_version: int) -> bool:
        """A report sent at ``sent_s`` was answered; return whether the node was in touch then."""
        if applied_version >= newest_version:
            self.since_s, self._pending = max(self.since_s, sent_s), None
            return True
        # The first one stays: under a stream of changes the newest would be out of reach again and again.
        if self._pending is None:
            self._pending = (sent_s, newest_version)
        return False

    def applied(self, version: int) -> None:
        """The node goes by ``version`` from now on."""
        if self._pending is not None and version >= self._pending[1]:
            self.since_s, self._pending = max(self.since_s, self._pending[0]), None

    def behind_s(self, now_s: float) -> float:
        """For how long the node has known of a policy that it does not go by, in seconds; 0 if of none."""
        return now_s - self._pending[0] if self._pending is not None else 0.0
