"""Well-formed policies as the control plane pushes them, to be spoiled by tests."""

from __future__ import annotations

from collections.abc import Iterable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from saltern.admin.v1 import quotas_pb2, tenants_pb2
from saltern.node.v1 import node_pb2
from tenants.tokens import public_key_to_x

KEY = Ed25519PrivateKey.generate().public_key()


def snapshot(version: int = 7) -> node_pb2.PolicySnapshot:
    """One tenant, ``acme``, with one namespace, a DRAM quota of 1 and 2 bytes, and two rates."""
    message = node_pb2.PolicySnapshot(version=version)
    message.key_set.issuer = "saltern-1"
    message.key_set.keys.add(kid="k1", kty="OKP", crv="Ed25519", x=public_key_to_x(KEY), alg="EdDSA", use="sig")
    tenant = message.tenants.add(tenant_id="acme", state=tenants_pb2.Tenant.STATE_ACTIVE)
    tenant.tiers.add(tier=quotas_pb2.TIER_DRAM, reserved_bytes=1, limit_bytes=2)
    tenant.namespaces.add(namespace_id="chat", uid="u", block_bytes=4096, epochs=[1, 2])
    tenant.rates.operations_per_s = 3
    tenant.rates.bytes_per_s = 4
    tenant.min_issue_time.seconds = 100
    tenant.min_issue_time.nanos = 1
    return message


def delta(
    base_version: int, version: int, *, changed: Iterable[str] = (), removed: Iterable[str] = ()
) -> node_pb2.PolicyDelta:
    """Tenants that are as ``acme`` in :func:`snapshot`, and tenants that are gone."""
    model = snapshot(max(version, 1))
    message = node_pb2.PolicyDelta(
        base_version=base_version, version=version, key_set=model.key_set, removed_tenant_ids=removed
    )
    for tenant_id in changed:
        message.tenants.add().CopyFrom(model.tenants[0])
        message.tenants[-1].tenant_id = tenant_id
    return message
