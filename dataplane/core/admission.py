"""From a verified token to a :class:`Partition`: the only place that makes one (I2).

A namespace that does not exist and one that belongs to somebody else get the same answer, so that nobody learns which
names are taken.
"""

from __future__ import annotations

from dataplane.core.partition import Partition
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
) -> Partition:
    """Check a session's wish against the policy and return what it may work in.

    Args:
        policy: the snapshot that the node serves now.
        claims_tenant, claims_namespace: from a token that this node has verified (I1), never from the request.
        requested_namespace: the namespace named in the request.
        epoch: the salt epoch that the client derives its keys with.

    Raises:
        PermissionDeniedError: NAMESPACE_NOT_AVAILABLE (unknown tenant, absent or foreign namespace, or not the one of
            the token), TENANT_SUSPENDED, EPOCH_NOT_AVAILABLE (unknown, not yet or no longer readable).
    """
    tenant = policy.tenants.get(claims_tenant)
    namespace = None if tenant is None else tenant.namespaces.get(requested_namespace)
    if namespace is None or requested_namespace != claims_namespace:
        raise namespace_not_available(requested_namespace)
    partition = _name_partition(claims_tenant, requested_namespace, namespace.uid, epoch)
    refused = check_partition(policy, partition)
    if refused is None:
        return partition
    try:
        raise refused
    finally:
        del refused  # an error whose own traceback leads to it would be left to the garbage collector


def restore_partition(
    policy: NodePolicy, tenant: TenantId, namespace: NamespaceId, namespace_uid: str, epoch: int
) -> Partition | None:
    """Return a partition of which an earlier process has left entries; None if ``policy`` does not name it (I12).

    The entries are only put back where they were: reading them takes a verified session as ever, whose partition must
    be equal to this one. A suspended tenant's partition is named, though not open.
    """
    rules = policy.tenants.get(tenant)
    current = None if rules is None else rules.namespaces.get(namespace)
    if current is None or current.uid != namespace_uid or epoch not in current.epochs:
        return None
    return _name_partition(tenant, namespace, namespace_uid, epoch)


def check_partition(policy: NodePolicy, partition: Partition) -> PermissionDeniedError | None:
    """Say why ``policy`` does not, or no longer, open ``partition``; None if it does."""
    tenant = policy.tenants.get(partition.tenant)
    namespace = None if tenant is None else tenant.namespaces.get(partition.namespace)
    if tenant is None or namespace is None or namespace.uid != partition.namespace_uid:
        return namespace_not_available(partition.namespace)
    if tenant.state is not TenantState.ACTIVE:
        return tenant_suspended(partition.tenant)
    if partition.epoch not in namespace.epochs:
        return epoch_not_available(partition.epoch)
    return None


def _name_partition(tenant: TenantId, namespace: NamespaceId, namespace_uid: str, epoch: int) -> Partition:
    return Partition(tenant, namespace, namespace_uid, epoch)


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


def epoch_not_available(epoch: int) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"salt epoch {epoch} is not available for this operation",
        reason="EPOCH_NOT_AVAILABLE",
        hint="exchange the API key again and derive the block keys with the newest epoch",
        metadata={"epoch": str(epoch)},
    )
