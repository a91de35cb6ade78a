"""What authentication costs a node: ``python -m dataplane.gate_cost`` prints it as JSON.

``token_verify_us`` is the verification of a token that was never seen, once for each token; ``gate_check_ns`` is what
every request of an open session pays. The bench runs this as a program, because clients import no server code.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dataplane.core.cache import CacheCore
from dataplane.io.clock import Clock
from dataplane.io.gate import Gate
from saltern.names import NamespaceId, TenantId
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota
from tenants.roles import Permission, Role
from tenants.tokens import Audience, Claims, KeySet, sign_token

_TENANT, _NAMESPACE, _ISSUER, _KEY_ID = TenantId("acme"), NamespaceId("chat"), "gate-cost", "key-1"
_CAPACITY_BYTES: Final = 1024 * 1024
_TOKENS: Final = 200
_ROUNDS, _CHECKS = 20, 10_000


def gate_cost() -> dict[str, float]:
    """Medians over tokens and over rounds of checks."""
    key = Ed25519PrivateKey.generate()
    gate = Gate(CacheCore(_CAPACITY_BYTES), Clock())
    gate.apply(_policy(), KeySet(_ISSUER, {_KEY_ID: key.public_key()}))
    tokens = [_token(key) for _ in range(_TOKENS)]
    verified_s = [_seconds(lambda token=token: gate.admit(token, _NAMESPACE, 1)) for token in tokens]  # type: ignore[misc]
    grant = gate.admit(tokens[0], _NAMESPACE, 1)

    def check_many() -> None:
        for _ in range(_CHECKS):
            gate.check(grant, Permission.ENTRIES_READ)

    checked_s = [_seconds(check_many) / _CHECKS for _ in range(_ROUNDS)]
    return {"token_verify_us": 1e6 * median(verified_s), "gate_check_ns": 1e9 * median(checked_s)}


def _policy() -> NodePolicy:
    quota = TierQuota(reserved_bytes=0, limit_bytes=_CAPACITY_BYTES)
    namespaces = {_NAMESPACE: NamespacePolicy("uid-1", 4096, (1,))}
    return NodePolicy(1, {_TENANT: TenantPolicy(TenantState.ACTIVE, {Tier.DRAM: quota}, namespaces)})


def _token(key: Ed25519PrivateKey) -> str:
    now_s = int(time.time())
    claims = Claims(
        issuer=_ISSUER,
        subject=f"tenants/{_TENANT}/apiKeys/bench",
        audience=Audience.NODE,
        tenant=_TENANT,
        namespace=_NAMESPACE,
        role=Role.WRITER,
        issued_at_s=now_s,
        expires_at_s=now_s + 600,
        token_id=secrets.token_hex(16),
    )
    return sign_token(key, _KEY_ID, claims)


def _seconds(operation: Callable[[], object]) -> float:
    begin = time.perf_counter()
    operation()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.stdout.write(json.dumps(gate_cost()) + "\n")
