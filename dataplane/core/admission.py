"""From a verified token to a :class:`Partition`: the only place that makes one (I2).

A namespace that does not exist and one that belongs to somebody else get the same answer, so that nobody learns which
names are taken.
"""

from __future__ import annotations

from dataplane.core.partition import Partition, split_storage_uid
from saltern.errors import PermissionDeniedError
from saltern.names import NamespaceId, TenantId
from tenants.policy import NodePolicy, TenantState


def open_partition(
    policy: NodePolicy,
    *,
    claims_tenant: TenantId,
    claims_namespace: NamespaceId,
    requested_namespace: NamespaceId,
    epoch: int,
    group_uid: str = "",
) -> Partition:
    """Check a session's wish against the policy and return what it may work in.

    Args:
        policy: the snapshot that the node serves now.
        claims_tenant, claims_namespace: from a token that this node has verified (I1), never from the request.
        requested_namespace: the namespace named in the request.
        epoch: the salt epoch that the client derives its keys with.
        group_uid: the sharing group whose salt that is; empty for the namespace's own.

    Raises:
        PermissionDeniedError: NAMESPACE_NOT_AVAILABLE (unknown tenant, absent or foreign namespace, or not the one of
            the token), TENANT_SUSPENDED, GROUP_NOT_AVAILABLE (absent, or the namespace is no member),
            EPOCH_NOT_AVAILABLE (unknown, not yet or no longer readable).
    """
    tenant = policy.tenants.get(claims_tenant)
    namespace = None if tenant is None else tenant.namespaces.get(requested_namespace)
    if namespace is None or requested_namespace != claims_namespace:
        raise namespace_not_available(requested_namespace)
    partition = _name_partition(claims_tenant, requested_namespace, namespace.uid, epoch, group_uid)
    refused = check_partition(policy, partition)
    if refused is None:
        return partition
    try:
        raise refused
    finally:
        del refused  # an error whose own traceback leads to it would be left to the garbage collector


def peer_partitions(policy: NodePolicy, partition: Partition) -> tuple[Partition, ...]:
    """What a session of a sharing group may read besides its own partition: that of each peer, in the policy's order.

    Sharing needs both (I2): a peer counts only if its own rules name the same group and epoch and this namespace as a
    peer of theirs, so that half of a policy shares nothing. Empty outside of a group.
    """
    if not partition.group_uid or check_partition(policy, partition) is not None:
        return ()
    own = policy.tenants[partition.tenant].namespaces[partition.namespace].groups[partition.group_uid]
    found = []
    for peer in own.peers:
        its = _name_partition(peer.tenant, peer.namespace, peer.namespace_uid, partition.epoch, partition.group_uid)
        if its == partition or check_partition(policy, its) is not None:
            continue
        named = policy.tenants[peer.tenant].namespaces[peer.namespace].groups[partition.group_uid].peers
        if any((it.tenant, it.namespace_uid) == (partition.tenant, partition.namespace_uid) for it in named):
            found.append(its)
    return tuple(found)


def restore_partition(
    policy: NodePolicy, tenant: TenantId, namespace: NamespaceId, joined_uid: str, epoch: int
) -> Partition | None:
    """Return a partition of which an earlier process has left entries; None if ``policy`` does not name it (I12).

    The entries are only put back where they were: reading them takes a verified session as ever, whose partition must
    be equal to this one. A suspended tenant's partition is named, though not open.

    Args:
        joined_uid: :attr:`Partition.storage_uid`.
    """
    rules = policy.tenants.get(tenant)
    current = None if rules is None else rules.namespaces.get(namespace)
    namespace_uid, group_uid = split_storage_uid(joined_uid)
    if current is None or current.uid != namespace_uid or epoch not in current.epochs_of(group_uid):
        return None
    return _name_partition(tenant, namespace, namespace_uid, epoch, group_uid)


def check_partition(policy: NodePolicy, partition: Partition) -> PermissionDeniedError | None:
    """Say why ``policy`` does not, or no longer, open ``partition``; None if it does."""
    tenant = policy.tenants.get(partition.tenant)
    namespace = None if tenant is None else tenant.namespaces.get(partition.namespace)
    if tenant is None or namespace is None or namespace.uid != partition.namespace_uid:
        return namespace_not_available(partition.namespace)
    if tenant.state is not TenantState.ACTIVE:
        return tenant_suspended(partition.tenant)
    if partition.group_uid and partition.group_uid not in namespace.groups:
        return group_not_available()
    if partition.epoch not in namespace.epochs_of(partition.group_uid):
        return epoch_not_available(partition.epoch)
    return None


def _name_partition(
    tenant: TenantId, namespace: NamespaceId, namespace_uid: str, epoch: int, group_uid: str
) -> Partition:
    return Partition(tenant, namespace, namespace_uid, epoch, group_uid)


def namespace_not_available(namespace: NamespaceId) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"namespace {str(namespace)[:64]!r} is not available to this token",
        reason="NAMESPACE_NOT_AVAILABLE",
        hint="use the namespace that the token was issued for, and check that it still exists",
    )


def tenant_suspended(tenant: TenantId) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"tenant {tenant!r} is suspended",
        reason="TENANT_SUSPENDED",
        hint="ask the platform administrator to resume the tenant",
        metadata={"tenant": tenant},
    )


def group_not_available() -> PermissionDeniedError:
    """A group that does not exist and one that the namespace is no member of get the same answer."""
    return PermissionDeniedError(
        "the sharing group is not available to this namespace",
        reason="GROUP_NOT_AVAILABLE",
        hint="exchange the API key again; if it lasts, check that the namespace is still a member of the group",
    )


def epoch_not_available(epoch: int) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"salt epoch {epoch} is not available for this operation",
        reason="EPOCH_NOT_AVAILABLE",
        hint="exchange the API key again and derive the block keys with the newest epoch",
        metadata={"epoch": str(epoch)},
    )
