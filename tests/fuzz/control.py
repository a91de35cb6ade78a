"""The fuzz of the control plane."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from tests.fuzz.calls import NOBODY, CallFuzz, Outcome
from tests.fuzz.cases import Cases
from tests.fuzz.services import Method, control_methods
from tests.fuzz.values import Names
from tests.fuzz.world import KEEPER_ROLE, NAMES, OTHER, OWN, ROLES, SAND, SECRETS, World

ALL_ROLES = ("platform-admin", *ROLES, "node", NOBODY)
_OUTSIDERS = (*ROLES, NOBODY)
_FOREIGN = (
    f"tenants/{OTHER}",
    OTHER,
    f"tenants/{OTHER}/namespaces/{NAMES[0]}",
    f"tenants/{OTHER}/apiKeys/{NAMES[1]}",
    f"tenants/{OTHER}/sharingGroups/{NAMES[2]}",
    f"tenants/{OTHER}/quota",
    f"tenants/{OTHER}/saltPolicy",
    f"tenants/{OTHER}/auditEvents/1",
)


class ControlFuzz(CallFuzz):
    """Calls every method of the control plane in every way, as each role and as nobody.

    Args:
        only: a part of the paths of the methods that are called.
    """

    def __init__(self, world: World, seed: int, only: str = "") -> None:
        self._world = world
        methods = [method for method in control_methods() if only in method.path]
        names = {role: _names_of(role, world) for role in ALL_ROLES}
        super().__init__(
            world.channel,
            Outcome(seed),
            Cases(seed, methods, names, _able),
            names,
            secrets=[text.encode() for text in (*SECRETS, *NAMES, *world.other_secrets)],
            outsiders=_OUTSIDERS,
        )

    def secrets_from(self, method: Method) -> Sequence[bytes]:
        # The trail of a tenant says what its own callers were denied, by the names that they gave.
        own = {name.encode() for name in NAMES} if "AuditService" in method.path else ()
        return [secret for secret in super().secrets_from(method) if secret not in own]

    async def token(self, role: str) -> str:
        return await self._world.token(role)

    def token_refused(self, role: str, token: str) -> None:
        self._world.forget_token(role, token)

    async def run(self, seconds: float) -> Outcome:
        watching = asyncio.create_task(self._watch())
        try:
            return await super().run(seconds)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _watch(self) -> None:
        control = self._world.control
        while control.is_alive:
            self.outcome.resident_bytes.append(control.resident_bytes)
            self.outcome.descriptors.append(control.descriptors)
            await asyncio.sleep(1)


def _names_of(role: str, world: World) -> Names:
    """Whoever may change tenants changes only such as the fuzz can do without."""
    if role in _OUTSIDERS:
        return Names((OWN, OWN, OTHER, "absent"), _FOREIGN, [world.keys[name] for name in ROLES])
    keys = [key for name, key in world.keys.items() if name != KEEPER_ROLE]
    return Names((SAND, SAND, "sand-2", "absent"), ("tenants/absent", "absent"), keys)


def _able(method: Method) -> Sequence[str]:
    return ("node",) if "NodeService" in method.path else ("platform-admin", "platform-admin", "tenant-admin")
