"""From the snapshots and deltas that the control plane pushes to what a node serves by; and the books it reports back.

Each is taken whole or not at all: one malformed part refuses it, and the node keeps what it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Final, TypeVar

from dataplane.core.partition import UID_SEPARATOR
from dataplane.core.usage import NamespaceUsage, NodeUsage, SsdCounters, SsdUsage, TenantUsage
from saltern.admin.v1 import quotas_pb2, tenants_pb2, usage_pb2
from saltern.auth.v1 import auth_pb2
from saltern.errors import InvalidArgumentError, SalternError
from saltern.names import NamespaceId, TenantId, parse_namespace_id, parse_tenant_id
from saltern.node.v1 import node_pb2
from saltern.wire import ENTRY_MAX_BYTES
from tenants.policy import GroupPeer, GroupPolicy, NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.policy_delta import PolicyDelta
from tenants.quota import BYTES_MAX, NO_RATE_LIMITS, WEIGHT_DEFAULT, RateLimits, Tier, TierQuota
from tenants.revocation import NO_REVOCATIONS, Revocation, RevocationSet
from tenants.sharing import GROUP_MEMBERS_MAX
from tenants.tokens import KeySet, public_key_from_x

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
CauseT = TypeVar("CauseT", bound=StrEnum)

_STATES: Final[dict[int, TenantState]] = {
    tenants_pb2.Tenant.STATE_ACTIVE: TenantState.ACTIVE,
    tenants_pb2.Tenant.STATE_SUSPENDED: TenantState.SUSPENDED,
}
_TIERS: Final[dict[int, Tier]] = {quotas_pb2.TIER_DRAM: Tier.DRAM, quotas_pb2.TIER_SSD: Tier.SSD}
_UID_MAX_CHARS: Final = 64
#: Most namespaces have neither: one mapping for all of them.
_NO_LIMITS: Final[Mapping[Tier, int]] = MappingProxyType({})
_NO_GROUPS: Final[Mapping[str, GroupPolicy]] = MappingProxyType({})
_JWK_MEMBERS: Final = {"kty": "OKP", "crv": "Ed25519", "alg": "EdDSA", "use": "sig"}


class SnapshotDecoder:
    """Decodes snapshots one after the other; a tenant that is encoded as in the one before is the same object again.

    So of a snapshot of 10,000 tenants that changes ten, ten are decoded, and whoever compares objects knows which.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[TenantId, TenantPolicy]] = {}

    def decode(self, snapshot: node_pb2.PolicySnapshot) -> tuple[NodePolicy, KeySet]:
        """Decode and check a snapshot.

        Raises:
            InvalidArgumentError: POLICY_MALFORMED; the message says which part, and holds no secret because a snapshot
                has none.
        """
        known: dict[bytes, tuple[TenantId, TenantPolicy]] = {}
        with _refused_as_malformed():
            if snapshot.version < 1:
                raise _malformed(f"version {snapshot.version}")
            tenants = _unique("tenant", (self._tenant(tenant, known) for tenant in snapshot.tenants))
            key_set = decode_key_set(snapshot.key_set)
        self._known = known
        return NodePolicy(version=snapshot.version, tenants=tenants), key_set

    def _tenant(
        self, tenant: node_pb2.TenantPolicy, known: dict[bytes, tuple[TenantId, TenantPolicy]]
    ) -> tuple[TenantId, TenantPolicy]:
        encoded = tenant.SerializeToString()
        decoded = self._known.get(encoded)
        if decoded is None:
            decoded = _decode_tenant(tenant)
        known[encoded] = decoded
        return decoded


def decode_snapshot(snapshot: node_pb2.PolicySnapshot) -> tuple[NodePolicy, KeySet]:
    """Decode and check one snapshot; raises as :meth:`SnapshotDecoder.decode`."""
    return SnapshotDecoder().decode(snapshot)


def decode_delta(delta: node_pb2.PolicyDelta) -> tuple[PolicyDelta, KeySet]:
    """Decode and check a delta; raises as :func:`decode_snapshot`."""
    with _refused_as_malformed():
        if not 1 <= delta.base_version < delta.version:
            raise _malformed(f"a delta from version {delta.base_version} to {delta.version}")
        changed = _unique("tenant", (_decode_tenant(tenant) for tenant in delta.tenants))
        removed = frozenset(parse_tenant_id(tenant_id) for tenant_id in delta.removed_tenant_ids)
        if not removed.isdisjoint(changed):
            raise _malformed("a tenant is both changed and removed")
        return PolicyDelta(delta.base_version, delta.version, changed, removed), decode_key_set(delta.key_set)


@contextmanager
def _refused_as_malformed() -> Iterator[None]:
    try:
        yield
    except SalternError as error:
        if error.reason == "POLICY_MALFORMED":
            raise
        raise _malformed(error.message) from None


def decode_key_set(key_set: auth_pb2.KeySet) -> KeySet:
    """Decode the keys that may sign tokens; raises InvalidArgumentError for any that is not Ed25519."""
    if not key_set.issuer:
        raise _malformed("the key set names no issuer")
    keys = []
    for key in key_set.keys:
        if not key.kid or any(getattr(key, member) != value for member, value in _JWK_MEMBERS.items()):
            raise _malformed(f"key {key.kid[:64]!r} is not an Ed25519 signing key")
        keys.append((key.kid, public_key_from_x(key.x)))
    return KeySet(issuer=key_set.issuer, keys=_unique("key", keys))


def encode_usage(usage: NodeUsage) -> list[node_pb2.TenantUsage]:
    """Encode the absolute books and counters of every tenant (I8)."""
    return [
        node_pb2.TenantUsage(
            tenant_id=tenant,
            tiers=_encode_tiers(books),
            get_hits=books.counters.get_hits,
            get_misses=books.counters.get_misses,
            get_bytes=books.counters.get_bytes,
            put_bytes=books.counters.put_bytes,
            puts_stored=books.counters.puts_stored,
            puts_refused=books.counters.puts_refused,
            evictions=books.counters.evictions,
            evicted_bytes=books.counters.evicted_bytes,
            evictions_by_cause=_by_name(books.counters.evictions_by_cause),
            evicted_bytes_by_cause=_by_name(books.counters.evicted_bytes_by_cause),
            refused_by_reason=books.counters.refused_by_reason,
            taken_entries=books.counters.taken_entries,
            taken_bytes=books.counters.taken_bytes,
            ssd=None if books.ssd is None else _encode_ssd(books.ssd.counters),
            demotions_dropped_by_reason=None if books.ssd is None else _by_name(books.ssd.counters.dropped_by_reason),
            tenant_uid=books.uid,
            hit_tokens=books.counters.hit_tokens,
            namespaces=[_encode_namespace(name, part) for name, part in books.namespaces.items()],
        )
        for tenant, books in usage.tenants.items()
    ]


def _encode_namespace(name: NamespaceId, part: NamespaceUsage) -> node_pb2.NamespaceUsage:
    held = (
        (quotas_pb2.TIER_DRAM, part.used_bytes, part.entries, part.limit_bytes),
        (quotas_pb2.TIER_SSD, part.ssd_used_bytes, part.ssd_entries, part.ssd_limit_bytes),
    )
    return node_pb2.NamespaceUsage(
        namespace_id=name,
        uid=part.uid,
        tiers=[
            node_pb2.NamespaceTierUsage(tier=tier, used_bytes=used_bytes, entries=entries, limit_bytes=limit_bytes)
            for tier, used_bytes, entries, limit_bytes in held
            if used_bytes or limit_bytes is not None
        ],
        get_hits=part.get_hits,
        get_misses=part.get_misses,
        hit_tokens=part.hit_tokens,
    )


def _encode_tiers(books: TenantUsage) -> list[node_pb2.TenantTierUsage]:
    held: list[tuple[quotas_pb2.Tier.ValueType, TenantUsage | SsdUsage]] = [(quotas_pb2.TIER_DRAM, books)]
    if books.ssd is not None:
        held.append((quotas_pb2.TIER_SSD, books.ssd))
    return [
        node_pb2.TenantTierUsage(
            tier=tier,
            used_bytes=of_tier.used_bytes,
            entries=of_tier.entries,
            lent_bytes=max(0, of_tier.reserved_bytes - of_tier.used_bytes),
            borrowed_bytes=max(0, of_tier.used_bytes - of_tier.reserved_bytes),
        )
        for tier, of_tier in held
    ]


def _by_name(counts: Mapping[CauseT, int]) -> dict[str, int]:
    return {cause.value: count for cause, count in counts.items()}


def _encode_ssd(counters: SsdCounters) -> usage_pb2.SsdActivity:
    return usage_pb2.SsdActivity(
        reads=counters.reads,
        read_bytes=counters.read_bytes,
        read_failures=counters.read_failures,
        demotions=counters.demotions,
        demoted_bytes=counters.demoted_bytes,
        demotions_dropped=counters.demotions_dropped,
        relocations=counters.relocations,
        evictions=counters.evictions,
        written_bytes=counters.written_bytes,
        lost=counters.lost,
    )


def _decode_tenant(tenant: node_pb2.TenantPolicy) -> tuple[TenantId, TenantPolicy]:
    tenant_id = parse_tenant_id(tenant.tenant_id)
    state = _STATES.get(tenant.state)
    if state is None:
        raise _malformed(f"state {tenant.state} of tenant {tenant_id!r}")
    issue_time = tenant.min_issue_time
    return tenant_id, TenantPolicy(
        state=state,
        tiers=_shares(tuple((q.tier, q.reserved_bytes, q.limit_bytes, q.weight) for q in tenant.tiers)),
        namespaces=_unique("namespace", map(_decode_namespace, tenant.namespaces)),
        # Rounded up: a token issued within the second of a revocation is refused rather than let through (I10).
        min_issue_time_s=issue_time.seconds + (issue_time.nanos > 0),
        # A control plane of before the rates sends none: no limits, as it knew none.
        rates=_decode_rates(tenant.rates),
        revocations=RevocationSet(
            Revocation(revocation.token_id_prefix, revocation.issued_before_s) for revocation in tenant.revocations
        )
        if tenant.revocations
        else NO_REVOCATIONS,
        uid=tenant.uid,
    )


@lru_cache(maxsize=4096)
def _shares(quotas: tuple[tuple[int, int, int, int], ...]) -> Mapping[Tier, TierQuota]:
    """Shares by tier, of (tier, reserved, limit, weight). Thousands of tenants have the same few, checked once each."""
    return _unique("tier", (_decode_quota(*quota) for quota in quotas))


def _decode_quota(proto_tier: int, reserved_bytes: int, limit_bytes: int, weight: int) -> tuple[Tier, TierQuota]:
    tier = _TIERS.get(proto_tier)
    if tier is None:
        raise _malformed(f"tier {proto_tier}")
    return tier, TierQuota(reserved_bytes, limit_bytes, weight or WEIGHT_DEFAULT)


def _decode_rates(rates: quotas_pb2.RateLimits) -> RateLimits:
    if not rates.ByteSize():
        return NO_RATE_LIMITS
    return RateLimits(
        operations_per_s=rates.operations_per_s,
        bytes_per_s=rates.bytes_per_s,
        ssd_write_bytes_per_s=rates.ssd_write_bytes_per_s,
    )


def _decode_namespace(namespace: node_pb2.NamespacePolicy) -> tuple[NamespaceId, NamespacePolicy]:
    namespace_id = parse_namespace_id(namespace.namespace_id)
    uid, block_bytes, block_tokens = namespace.uid, namespace.block_bytes, namespace.block_tokens
    epochs = tuple(namespace.epochs)
    if not _is_uid(uid) or not 1 <= block_bytes <= ENTRY_MAX_BYTES:
        raise _malformed(f"namespace {namespace_id!r} has no uid or blocks of {block_bytes} bytes")
    if not _ascend(epochs):
        raise _malformed(f"the epochs of namespace {namespace_id!r} do not ascend")
    if block_tokens < 0:
        raise _malformed(f"blocks of {block_tokens} tokens in namespace {namespace_id!r}")
    limits, groups = namespace.tier_limits, namespace.groups
    return namespace_id, NamespacePolicy(
        uid=uid,
        block_bytes=block_bytes,
        epochs=epochs,
        block_tokens=block_tokens,
        tier_limits=_unique("limit", map(_decode_limit, limits)) if limits else _NO_LIMITS,
        groups=_unique("sharing group", (_decode_group(group, uid) for group in groups)) if groups else _NO_GROUPS,
    )


@lru_cache(maxsize=4096)
def _ascend(epochs: tuple[int, ...]) -> bool:
    return all(epoch >= 0 for epoch in epochs) and list(epochs) == sorted(set(epochs))


def _decode_limit(limit: node_pb2.TierLimit) -> tuple[Tier, int]:
    tier = _TIERS.get(limit.tier)
    if tier is None or not 0 <= limit.limit_bytes <= BYTES_MAX:
        raise _malformed(f"a limit of {limit.limit_bytes} bytes on tier {limit.tier}")
    return tier, limit.limit_bytes


def _decode_group(group: node_pb2.GroupPolicy, own_uid: str) -> tuple[str, GroupPolicy]:
    """I2: a group of which anything is odd refuses the policy: which of its members may read whom would be a guess."""
    epochs = tuple(group.epochs)
    if not _is_uid(group.uid):
        raise _malformed("a sharing group has no uid")
    if not epochs or not _ascend(epochs):
        raise _malformed(f"the epochs of sharing group {group.uid!r} do not ascend")
    peers = _unique("peer", ((peer.namespace_uid, _decode_peer(peer)) for peer in group.peers))
    if own_uid in peers or len(peers) >= GROUP_MEMBERS_MAX:
        raise _malformed(f"sharing group {group.uid!r} has {len(peers)} peers, or is its own")
    return group.uid, GroupPolicy(epochs, tuple(peers.values()))


def _decode_peer(peer: node_pb2.GroupPeer) -> GroupPeer:
    if not _is_uid(peer.namespace_uid):
        raise _malformed("a peer in a sharing group has no uid")
    return GroupPeer(parse_tenant_id(peer.tenant_id), parse_namespace_id(peer.namespace_id), peer.namespace_uid)


def _is_uid(uid: str) -> bool:
    """Two uids are joined by the separator where entries are stored, so neither may hold it."""
    return 0 < len(uid) <= _UID_MAX_CHARS and UID_SEPARATOR not in uid


def _unique(what: str, pairs: Iterable[tuple[KeyT, ValueT]]) -> MappingProxyType[KeyT, ValueT]:
    """A read-only mapping; raises InvalidArgumentError if a name comes twice: which one counts would be a guess."""
    mapping: dict[KeyT, ValueT] = {}
    for key, value in pairs:
        if key in mapping:
            raise _malformed(f"{what} {str(key)[:64]!r} comes twice")
        mapping[key] = value
    return MappingProxyType(mapping)


def _malformed(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"malformed policy snapshot: {what}",
        reason="POLICY_MALFORMED",
        hint="run control plane and nodes of the same release",
    )
