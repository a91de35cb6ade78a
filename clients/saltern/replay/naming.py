"""What a replay calls its tenants, nodes and blocks: for every engine the same, since names decide where blocks lie."""

from __future__ import annotations

from typing import Final

from saltern.keys import BlockHash
from saltern.names import NamespaceId, NodeId, TenantId

NAMESPACE: Final = NamespaceId("replay")
_UNNAMED: Final = TenantId("unnamed")


def tenant_id(name: str) -> TenantId:
    """Of a tenant of a trace; a trace that names none has one."""
    return TenantId(name) if name else _UNNAMED


def tenant_name(tenant: TenantId) -> str:
    """The other way round."""
    return "" if tenant == _UNNAMED else str(tenant)


def node_id(number: int) -> NodeId:
    return NodeId(f"node-{number}")


def block_hash(block_id: int) -> BlockHash:
    """What an engine would call the block."""
    return BlockHash(block_id.to_bytes(8, "big"))
