"""What the gate remembers of tokens: as many as are good now, however many there have been."""

from __future__ import annotations

import gc
import secrets

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dataplane.core.cache import CacheCore
from dataplane.io import gate as gate_module
from dataplane.io.clock import Clock
from dataplane.io.gate import Gate
from saltern.names import NamespaceId, TenantId
from tenants.policy import NodePolicy
from tenants.roles import Role
from tenants.tokens import Audience, Claims, KeySet, sign_token
from tests.support.static_node import MIB, tenant_policy

LIFETIME_S = 600
KEY = Ed25519PrivateKey.generate()


class Gates:
    """A gate whose clock the test sets, and tokens for it."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000
        self.subject = f"tenants/acme/apiKeys/{secrets.token_hex(8)}"
        self.gate = Gate(CacheCore(MIB), Clock(unix_s=lambda: float(self.now_s)))
        policy = NodePolicy(1, {TenantId("acme"): tenant_policy(limit_bytes=MIB)})
        self.gate.apply(policy, KeySet("test", {"key-1": KEY.public_key()}))

    def admit(self, number: int) -> None:
        claims = Claims(
            issuer="test",
            subject=self.subject,
            audience=Audience.NODE,
            tenant=TenantId("acme"),
            namespace=NamespaceId("chat"),
            role=Role.WRITER,
            issued_at_s=self.now_s,
            expires_at_s=self.now_s + LIFETIME_S,
            token_id=f"{number:032x}",
        )
        self.gate.admit(sign_token(KEY, "key-1", claims), "chat", 1)

    @property
    def remembered(self) -> int:
        return sum(isinstance(one, Claims) and one.subject == self.subject for one in gc.get_objects())


def test_expired_tokens_are_forgotten() -> None:
    """A client takes a new token every ten minutes, for years."""
    gates = Gates()
    for number in range(100):
        gates.admit(number)
        gates.now_s += 60
    assert gates.remembered == LIFETIME_S // 60


def test_no_more_tokens_are_remembered_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "VERIFIED_TOKENS_MAX", 8)
    gates = Gates()
    for number in range(20):
        gates.admit(number)
    assert gates.remembered == 8
