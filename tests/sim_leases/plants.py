"""Faults planted on purpose: each breaks one line that a rule rests on, and the simulator must find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from controlplane.core import lease_terms, leases, policy_reach
from dataplane.core.cache import CacheCore
from dataplane.core.in_touch import InTouch
from dataplane.core.lease import Lease
from dataplane.core.policy_in_force import PolicyInForce
from tests.sim_leases.control import ControlPlane
from tests.sim_leases.process import Process


def _patch(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def _keep_nothing_first(_: Any) -> Any:
    return property(lambda process: process.core.settled_version)


def _reclaim_at_once(original: Any) -> Any:
    def due(nodes: Any, now_ms: int) -> Any:
        run_out = {
            node: replace(standing, terms=replace(standing.terms, expire_ms=0)) if standing.is_lost else standing
            for node, standing in nodes.items()
        }
        return original(run_out, now_ms)

    return due


def _nobody_is_late(original: Any) -> Any:
    def reach(*given: Any) -> Any:
        known = original(*given)
        return replace(known, expired=(*known.expired, *known.late), late=())

    return reach


def _without_the_lease(original: Any) -> Any:
    def peers(policies: PolicyInForce, partition: Any, now_ns: int) -> Any:
        return original(policies, partition, min(now_ns, policies.stops_ns - 1))

    return peers


@contextmanager
def _judge_a_session_once() -> Iterator[None]:
    """What a session of a group may read is looked up as it is opened, and never again."""
    first: dict[Any, Any] = {}

    def peers_as_they_were(original: Any) -> Any:
        def peers(policies: PolicyInForce, partition: Any, now_ns: int) -> Any:
            found = original(policies, partition, now_ns)
            return (
                first.setdefault((id(policies), partition), found)
                if found
                else first.get((id(policies), partition), ())
            )

        return peers

    def access_as_it_was(original: Any) -> Any:
        return lambda core, partition: None if partition.group_uid else original(core, partition)

    with _patch(PolicyInForce, "peers", peers_as_they_were), _patch(CacheCore, "check_access", access_as_it_was):
        yield


#: What is broken, by name.
PLANTS: Final[dict[str, Callable[[], Any]]] = {
    "grow-before-shrunk": lambda: _patch(
        leases, "believed_bytes", lambda _: lambda holding, member: holding.granted_bytes
    ),
    "forget-what-was-believed": lambda: _patch(
        leases,
        "step",
        lambda original: (
            lambda *given: {
                node: replace(holding, believed_bytes=holding.granted_bytes)
                for node, holding in original(*given).items()
            }
        ),
    ),
    "reclaim-from-the-living": lambda: _patch(lease_terms, "due", _reclaim_at_once),
    "renew-whatever-it-goes-by": lambda: _patch(Lease, "stops_ns", lambda _: lambda lease, version: lease.expires_ns),
    "count-from-the-answer": lambda: _patch(
        Process,
        "renew",
        lambda original: (
            lambda process, sent_ms, version, now_ms: original(process, process.clock_ms(now_ms), version, now_ms)
        ),
    ),
    "never-freeze": lambda: _patch(PolicyInForce, "freeze", lambda _: lambda policies: None),
    "settle-with-transfers": lambda: _patch(
        CacheCore, "settled_version", lambda _: property(lambda core: core.policy.version)
    ),
    "settle-before-kept": lambda: _patch(Process, "settled_version", _keep_nothing_first),
    "no-wait-for-the-process-before": lambda: _patch(
        lease_terms,
        "registered",
        lambda original: (
            lambda before, state_id, *given: original(replace(before, state_id=state_id), state_id, *given)
        ),
    ),
    "settled-by-the-wrong-process": lambda: _patch(
        lease_terms,
        "settled",
        lambda _: lambda terms, version: replace(terms, settled_version=max(terms.settled_version, version)),
    ),
    "in-touch-by-any-answer": lambda: _patch(
        InTouch, "answered", lambda original: lambda touch, sent_s, _, applied: original(touch, sent_s, 0, applied)
    ),
    "no-margin": lambda: _patch(
        lease_terms,
        "renewed",
        lambda original: (
            lambda terms, now_ms, duration_ms, version: replace(terms, expire_ms=now_ms + duration_ms - 8_000)
        ),
    ),
    "wait-past-the-late": lambda: _patch(policy_reach, "reach", _nobody_is_late),
    "wait-past-the-process-before": lambda: _patch(
        policy_reach,
        "reach",
        lambda original: (
            lambda nodes, *given: original(
                {node: replace(known, terms=replace(known.terms, from_ms=None)) for node, known in nodes.items()},
                *given,
            )
        ),
    ),
    "renew-what-had-run-out": lambda: _patch(
        lease_terms,
        "renewed",
        lambda original: lambda terms, now_ms, duration_ms, _: original(terms, now_ms, duration_ms, 0),
    ),
    "acknowledge-before-kept": lambda: _patch(
        Process, "versions", lambda _: property(lambda process: (process.core.policy.version, process.settled_version))
    ),
    "confirm-before-kept": lambda: _patch(Process, "confirms", lambda _: lambda process, newest_version: True),
    "forget-a-change": lambda: _patch(
        ControlPlane,
        "changed_since",
        lambda original: lambda control, base_version: original(control, min(base_version + 1, control.version)),
    ),
    "keep-what-is-lost": lambda: _patch(lease_terms, "due", lambda _: lambda nodes, now_ms: lease_terms.Due()),
    "share-without-a-lease": lambda: _patch(PolicyInForce, "peers", _without_the_lease),
    "judge-a-session-once": _judge_a_session_once,
    "leave-it-unmoved": lambda: _patch(
        ControlPlane,
        "lease",
        lambda original: lambda *given, **which: None if given[0].version > 40 else original(*given, **which),
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Break what ``name`` says for the time of the block."""
    with PLANTS[name]():
        yield
