"""A node with a policy of its own and no control plane, for measuring at scales that take long to set up otherwise.

``python -m dataplane.bench_node FOLDER DRAM_BYTES TENANTS`` serves ``TENANTS`` tenants, each allowed more than the
memory holds, until its standard input closes. Doors, gate and tokens are the real ones. A token for each tenant, signed
by a key that goes with the process, lies one a line in ``FOLDER/tokens``. Prints one line of JSON when it serves.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dataplane.log import configure_logging
from dataplane.node import Node
from dataplane.settings import NodeSettings
from saltern.endpoints import Endpoint
from saltern.names import NamespaceId, NodeId, TenantId
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota
from tenants.roles import Role
from tenants.tokens import LIFETIME_MAX_S, Audience, Claims, KeySet, sign_token

_NODE, _NAMESPACE = NodeId("bench-node"), NamespaceId("bench")
_ISSUER, _KEY_ID = "bench-node", "key-1"
_BLOCK_BYTES: Final = 1024 * 1024
_TOKEN_LIFE_S: Final = LIFETIME_MAX_S
_LOOPBACK: Final = Endpoint("127.0.0.1", 0)


async def serve(folder: Path, dram_bytes: int, tenant_count: int) -> None:
    """Serve until standard input closes."""
    configure_logging(_NODE)
    key = Ed25519PrivateKey.generate()
    names = [TenantId(f"tenant-{number}") for number in range(tenant_count)]
    (folder / "tokens").write_text("".join(f"{_token(key, name)}\n" for name in names))
    settings = NodeSettings(
        node_id=_NODE,
        listen=_LOOPBACK,
        grpc_listen=_LOOPBACK,
        shm_path=folder / "node.sock",
        dram_bytes=dram_bytes,
    )
    node = Node(settings)
    async with node.serving() as endpoints:
        node.apply(_policy(names, dram_bytes), KeySet(_ISSUER, {_KEY_ID: key.public_key()}))
        ready = {"wire_endpoint": endpoints.wire_endpoint, "shm_path": str(endpoints.shm_path)}
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


def _policy(names: list[TenantId], dram_bytes: int) -> NodePolicy:
    # Above what the pool holds, so that nothing is evicted at the soft mark before the pool is full.
    tiers = {Tier.DRAM: TierQuota(reserved_bytes=0, limit_bytes=2 * dram_bytes)}
    namespaces = {_NAMESPACE: NamespacePolicy("uid-1", _BLOCK_BYTES, (1,))}
    return NodePolicy(1, {name: TenantPolicy(TenantState.ACTIVE, tiers, namespaces) for name in names})


def _token(key: Ed25519PrivateKey, tenant: TenantId) -> str:
    now_s = int(time.time())
    claims = Claims(
        issuer=_ISSUER,
        subject=f"tenants/{tenant}/apiKeys/bench",
        audience=Audience.NODE,
        tenant=tenant,
        namespace=_NAMESPACE,
        role=Role.WRITER,
        issued_at_s=now_s,
        expires_at_s=now_s + _TOKEN_LIFE_S,
        token_id=secrets.token_hex(16),
    )
    return sign_token(key, _KEY_ID, claims)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
