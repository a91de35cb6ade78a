"""What answers let a node do, and what it may say: counted from when it asked, kept before it is said (I4, I9)."""

from __future__ import annotations

from math import inf
from time import monotonic

from dataplane.core.lease import NEVER_NS, Lease
from dataplane.lease_line import LeaseLine
from saltern.node.v1 import node_pb2


class Node:
    """What the line needs of a node."""

    applied_version = 5
    settled_version = 5
    lease = Lease()

    def renew(self, lease: Lease) -> None:
        self.lease = lease


def answered(duration_s: int = 600, lease_version: int = 1, policy_version: int = 5) -> node_pb2.ReportUsageResponse:
    answer = node_pb2.ReportUsageResponse(lease_version=lease_version, policy_version=policy_version)
    answer.lease_duration.FromSeconds(duration_s)
    return answer


def test_a_lease_counts_from_when_the_report_was_sent_and_never_shrinks() -> None:
    node = Node()
    line = LeaseLine(node)
    assert line.has_run_out
    sent_s = monotonic() - 100
    assert line.reported(sent_s, answered())
    assert node.lease == Lease(int((sent_s + 600) * 1e9), 1)
    line.reported(sent_s - 50, answered())
    assert node.lease == Lease(int((sent_s + 600) * 1e9), 1)
    assert not line.has_run_out


def test_i4_a_lease_of_a_policy_that_is_not_there_yet_lets_nothing_grow() -> None:
    node = Node()
    line = LeaseLine(node)
    assert not line.reported(monotonic(), answered(lease_version=6, policy_version=6))
    assert line.has_run_out
    node.applied_version = 6
    assert not line.has_run_out


def test_a_control_plane_of_before_the_leases_grants_for_ever() -> None:
    node = Node()
    LeaseLine(node).registered(monotonic(), node_pb2.RegisterNodeResponse())
    assert node.lease.expires_ns == NEVER_NS


def test_i4_nothing_is_settled_before_it_is_kept() -> None:
    line = LeaseLine(Node())
    assert line.settled_version == 0
    line.kept(4)
    assert line.settled_version == 4
    line.kept(7)
    assert line.settled_version == 5


def test_i9_a_kept_policy_leaves_what_is_left_of_its_lease() -> None:
    snapshot = node_pb2.PolicySnapshot(version=5)
    snapshot.lease_duration.FromSeconds(600)
    for age_s, has_run_out in ((599.0, False), (601.0, True), (inf, True)):
        line = LeaseLine(Node())
        since_s = monotonic() - age_s
        line.resumed(snapshot, 0.0, since_s)
        assert line.has_run_out is has_run_out, age_s
