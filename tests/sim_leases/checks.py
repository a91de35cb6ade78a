"""What must hold after every event, and what must come to hold when every fault has ended."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.core.leases import NOTHING
from tests.sim_leases.control import ControlPlane
from tests.sim_leases.process import POLICY_AGE_MAX_MS, Process

#: How much longer than it counts a process's clock may take.
_CLOCK_SLACK = 1.001


def check_instant(control: ControlPlane, processes: Iterable[Process], now_ms: int) -> None:
    """I4, I9, what waits promise, and that a policy is one that there was: at one instant."""
    serving = [process for process in processes if process.is_serving(now_ms)]
    growing = [process for process in serving if process.may_grow(now_ms)]
    for tenant in control.quotas:
        for node in {process.node for process in growing}:
            of_node = sum(_exposed_bytes(process, tenant) for process in growing if process.node == node)
            believed = control.believed_bytes(tenant, node)
            assert of_node <= believed, f"I4: {node} goes by {of_node} of {tenant}, the books say {believed}"
        total = sum(_exposed_bytes(process, tenant) for process in growing)
        # What is in transfer when a limit is lowered ends first; until then the process is still under the old one.
        oldest = min((process.core.settled_version for process in growing), default=control.version)
        ceiling = _ceiling_bytes(control, tenant, oldest)
        assert total <= ceiling, f"I4: nodes go by {total} of {tenant}, whose quota was at most {ceiling}"
    for process in serving:
        version = process.core.policy.version
        if version:
            composed = control.composed[process.node, version]
            assert process.rules == composed, f"{process.node} goes by what {version} was not"
        superseded_ms = control.version_times.get(version + 1, now_ms)
        stale_ms = now_ms - superseded_ms
        assert stale_ms <= POLICY_AGE_MAX_MS * _CLOCK_SLACK, f"I9: {process.node} serves a policy {stale_ms} ms stale"
        _check_sharing(control, process, now_ms, holds_a_lease=process in growing)
        if process in growing:
            assert version >= control.waited_version, (
                f"waited: {process.node} shares and grows by {version} after {control.waited_version} was everywhere"
            )
            if process.core.settled_version == version:
                process.residue.clear()
            else:  # what has grown since, within the lease, is what stayed no more
                process.residue = {
                    tenant: held for tenant, held in process.residue.items() if process.used_bytes(tenant) <= held
                }
            continue
        for tenant in control.quotas:
            used_bytes = process.used_bytes(tenant)
            before_bytes = process.residue.get(tenant, used_bytes)
            assert used_bytes <= before_bytes, f"I9: {process.node} grew from {before_bytes} after its lease"
            process.residue[tenant] = used_bytes


def _check_sharing(control: ControlPlane, process: Process, now_ms: int, *, holds_a_lease: bool) -> None:
    """I2, I12: who reads a peer is in touch, and both are in the group, or were and nobody was told otherwise."""
    if process.readers_of_peers(now_ms):
        assert holds_a_lease, f"I2: {process.node} shares after its lease"
        assert control.was_shared_since(control.waited_version), f"I2: {process.node} shares after all left and waited"
        # The bound for whoever does not wait: that of any policy.
        version = max((at for at, ms in control.version_times.items() if ms <= _oldest_ms(now_ms)), default=0)
        assert control.was_shared_since(version), f"I2: {process.node} shares past the bound"
    for tenant, owner in process.core._pool.tenants.items():
        rules = process.rules.get(tenant)
        epochs = {partition.epoch for partition in owner.partitions if partition.group_uid}
        assert rules is None or epochs <= {rules.group_epoch}, f"I12: {process.node} keeps {tenant}'s of {epochs}"


def _oldest_ms(now_ms: int) -> float:
    return now_ms - POLICY_AGE_MAX_MS * _CLOCK_SLACK


def check_healed(control: ControlPlane, processes: Iterable[Process], now_ms: int) -> None:
    """Liveness: without faults the whole quota is granted, settled and in force again."""
    processes = [process for process in processes if process.is_alive]
    for process in processes:
        version = process.core.policy.version
        assert version == control.version, f"liveness: {process.node} goes by {version} of {control.version}"
        assert process.may_grow(now_ms), f"liveness: {process.node} has no lease"
        for tenant in control.members:
            process.open_group(tenant, now_ms)
        sharing = set(control.members) if len(control.members) > 1 else set()
        assert process.readers_of_peers(now_ms) == sharing, (
            f"liveness: {process.node} does not share as {sharing} agreed"
        )
    for tenant, quota in control.quotas.items():
        granted = sum(holding.granted_bytes for holding in control.holdings[tenant].values())
        assert granted == quota, f"liveness: {granted} of {quota} of {tenant} are granted"
        in_force = sum(process.limit_bytes(tenant) for process in processes)
        assert in_force == quota, f"liveness: {in_force} of {quota} of {tenant} are in force"
        for node, row in control.nodes.items():
            holding = control.holdings[tenant].get(node, NOTHING)
            assert not (row.is_draining and holding.granted_bytes), f"liveness: {node} drains and holds {holding}"


def _exposed_bytes(process: Process, tenant: str) -> int:
    """What it has or may take: its share, and what it still has above it while transfers end.

    What stayed when its lease ran out is beside that (I9), until it has settled a policy again.
    """
    limit_bytes, used_bytes = process.limit_bytes(tenant), process.used_bytes(tenant)
    return limit_bytes if used_bytes <= process.residue.get(tenant, 0) else max(limit_bytes, used_bytes)


def _ceiling_bytes(control: ControlPlane, tenant: str, since_version: int) -> int:
    """The largest quota of a tenant from a version on."""
    history = control.quota_history[tenant]
    later = [quota for version, quota in history if version > since_version]
    in_force = [quota for version, quota in history if version <= since_version][-1:]
    return max([*in_force, *later])
