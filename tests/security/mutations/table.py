"""All mutations."""

from __future__ import annotations

from typing import Final

from tests.security.mutations import clients, console, gateway, identity, node, records, sharing_and_policy
from tests.security.mutations.values import Mutation

MUTATIONS: Final[tuple[Mutation, ...]] = (
    *identity.MUTATIONS,
    *sharing_and_policy.MUTATIONS,
    *records.MUTATIONS,
    *node.MUTATIONS,
    *clients.MUTATIONS,
    *console.MUTATIONS,
    *gateway.MUTATIONS,
)
