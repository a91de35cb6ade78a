"""The node's side of its lease (I4, I9): what answers of the control plane let it do, and what it may say of itself.

Only durations come over the wire. They count from when the node *sent* what is answered, on its own monotonic clock, so
the node stops growing before the control plane gives its shares away, however long an answer took.
"""

from __future__ import annotations

from time import monotonic
from typing import Final, Protocol

from google.protobuf.duration_pb2 import Duration

from dataplane.core.in_touch import InTouch
from dataplane.core.lease import NEVER_NS, Lease
from saltern.node.v1 import node_pb2

_S_NS: Final = 1_000_000_000


class Leased(Protocol):
    """What grows by a lease: :class:`dataplane.node.Node`."""

    @property
    def applied_version(self) -> int: ...
    @property
    def settled_version(self) -> int: ...
    def renew(self, lease: Lease) -> None: ...


class LeaseLine:
    """Times are of ``time.monotonic``.

    Attributes:
        touch: when the node was last in touch.
    """

    def __init__(self, node: Leased) -> None:
        self.touch = InTouch(monotonic())
        self._node = node
        self._lease = Lease(expires_ns=0)
        self._kept_version = 0

    @property
    def has_run_out(self) -> bool:
        """Whether nothing may grow now."""
        return monotonic() * _S_NS >= self._lease.stops_ns(self._node.applied_version)

    @property
    def acknowledged_version(self) -> int:
        """The newest policy that the node goes by, also after a restart: whoever waits for it may rely on that."""
        return min(self._node.applied_version, self._kept_version)

    @property
    def settled_version(self) -> int:
        """The newest policy that the node goes by, also after a restart, with nothing held above its limits."""
        return min(self._node.settled_version, self._kept_version)

    def kept(self, version: int) -> None:
        """A restart would go by ``version`` or a later one, or by none."""
        self._kept_version = max(self._kept_version, version)

    def registered(self, sent_s: float, answer: node_pb2.RegisterNodeResponse) -> None:
        """A registration sent at ``sent_s`` was answered."""
        self._renew(sent_s, answer.lease_duration if answer.HasField("lease_duration") else None, answer.lease_version)

    def reported(self, sent_s: float, answer: node_pb2.ReportUsageResponse) -> bool:
        """A report sent at ``sent_s`` was answered; return whether the node was in touch then."""
        self._renew(sent_s, answer.lease_duration if answer.HasField("lease_duration") else None, answer.lease_version)
        return self.touch.answered(sent_s, answer.policy_version, self._node.applied_version)

    def resumed(self, snapshot: node_pb2.PolicySnapshot, in_touch_s: float, lease_since_s: float) -> None:
        """The node goes by a kept policy, and nobody has answered it yet.

        Args:
            lease_since_s: when it was in touch; ``-inf`` where nobody can say, because a clock was set back.
        """
        self.touch = InTouch(in_touch_s)
        self.kept(snapshot.version)
        duration = snapshot.lease_duration if snapshot.HasField("lease_duration") else None
        self._renew(lease_since_s, duration, 0)

    def _renew(self, sent_s: float, duration: Duration | None, version: int) -> None:
        if duration is None:  # a control plane of before the leases: its shares hold for ever
            expires_ns = NEVER_NS
        else:
            expires_s = sent_s + duration.ToTimedelta().total_seconds()
            expires_ns = max(self._lease.expires_ns, int(max(expires_s, 0.0) * _S_NS))
        self._lease = Lease(expires_ns, max(self._lease.version, version))
        self._node.renew(self._lease)
