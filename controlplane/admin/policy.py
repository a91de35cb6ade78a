"""PolicyService: wait until a change is in force on every node."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

from google.protobuf.duration_pb2 import Duration
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.fields import refused
from controlplane.admin.service import AdminParts, AdminServicer, method
from controlplane.caller import Caller, authorise, current_caller
from controlplane.core.policy_reach import NodeReach, Reach, reach
from controlplane.db import models
from controlplane.node.lease_rows import terms_of, to_ms
from controlplane.node.policy_rows import read_version
from controlplane.rpc import Context
from saltern.admin.v1 import policy_pb2, policy_pb2_grpc
from saltern.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError
from saltern.names import NodeId, TenantId
from saltern.policy_version import WAIT_DEFAULT_S, WAIT_MAX_S
from tenants.roles import Permission

#: At a time, in one process: of all callers, of all tenants together, of one tenant. A wait looks at the database again
#: and again, and tenants leave room for the platform's own.
WAITS_MAX: Final = 256
TENANTS_WAITS_MAX: Final = 192
TENANT_WAITS_MAX: Final = 8
#: Nodes whose streams another control plane holds wake nobody here.
_LOOK_FIRST_S: Final = 0.05
_LOOK_MAX_S: Final = 0.5
_NODES_NAMED_MAX: Final = 20


class PolicyService(AdminServicer, policy_pb2_grpc.PolicyServiceServicer):
    service = "saltern.admin.v1.PolicyService"

    def __init__(self, parts: AdminParts) -> None:
        super().__init__(parts)
        self._waits: Counter[TenantId | None] = Counter()

    @method
    async def WaitForPolicy(
        self, request: policy_pb2.WaitForPolicyRequest, context: Context
    ) -> policy_pb2.WaitForPolicyResponse:
        caller = authorise(Permission.TENANTS_READ, current_caller().tenant)
        timeout_s = _parse_timeout(request.timeout) if request.HasField("timeout") else WAIT_DEFAULT_S
        version = await self._wanted(request.version)
        with self._place(caller.tenant):
            reached = await self._wait(version, timeout_s, caller)
        return policy_pb2.WaitForPolicyResponse(
            version=version, acknowledged_nodes=len(reached.acknowledged), expired_nodes=len(reached.expired)
        )

    @contextmanager
    def _place(self, tenant: TenantId | None) -> Iterator[None]:
        """A place among those who wait, for the time of the block; raises ResourceExhaustedError (TOO_MANY_WAITS)."""
        waits = self._waits.total()
        limit = WAITS_MAX if tenant is None else TENANTS_WAITS_MAX
        if waits >= limit or (tenant is not None and self._waits[tenant] >= TENANT_WAITS_MAX):
            raise ResourceExhaustedError(
                "as many calls as may wait for policies already",
                reason="TOO_MANY_WAITS",
                hint="wait for the newest of several changes only",
                retry_after_ms=1000,
            )
        self._waits[tenant] += 1
        try:
            yield
        finally:
            self._waits[tenant] -= 1
            if not self._waits[tenant]:
                del self._waits[tenant]

    async def _wanted(self, version: int) -> int:
        """Raises InvalidArgumentError: POLICY_VERSION_UNKNOWN: no change has been answered with it."""
        async with self._database.transaction() as session:
            newest = await read_version(session)
        if not 0 <= version <= newest:
            raise InvalidArgumentError(
                f"there is no policy {version} yet: the newest is {newest}",
                reason="POLICY_VERSION_UNKNOWN",
                hint="give what a change was answered with in saltern-policy-version; after a restore of the database"
                " from a backup, what was answered before does not count",
            )
        return version or newest

    async def _wait(self, version: int, timeout_s: float, caller: Caller) -> Reach:
        deadline_s, look_s = monotonic() + timeout_s, _LOOK_FIRST_S
        while True:
            async with self._database.transaction() as session:
                nodes = await _read(session)
                reached = reach(nodes, version, self._now_ms())
                if reached.expired and not reached.late:
                    # A report in progress may renew such a lease for a policy from before this one: after it.
                    nodes = await _read(session, after_reports=True)
                    reached = reach(nodes, version, self._now_ms())
            if not reached.late:
                return reached
            left_s = deadline_s - monotonic()
            if left_s <= 0:
                raise _not_everywhere(version, timeout_s, reached, nodes, caller)
            await self._parts.feed.wait_answer(min(look_s, left_s))
            look_s = min(2 * look_s, _LOOK_MAX_S)

    def _now_ms(self) -> int:
        return to_ms(self._parts.clock())


async def _read(session: AsyncSession, *, after_reports: bool = False) -> dict[NodeId, NodeReach]:
    statement = select(models.Node).order_by(models.Node.id)
    if after_reports:
        statement = statement.with_for_update(read=True).execution_options(populate_existing=True)
    return {NodeId(row.id): NodeReach(row.applied_version, terms_of(row)) for row in await session.scalars(statement)}


def _parse_timeout(timeout: Duration) -> float:
    timeout_s = timeout.seconds + timeout.nanos / 1e9
    if not 0 <= timeout_s <= WAIT_MAX_S or timeout.nanos < 0:
        raise refused("timeout", f"is not between 0 and {WAIT_MAX_S:.0f} s", f"wait for at most {WAIT_MAX_S:.0f} s")
    return timeout_s


def _not_everywhere(
    version: int, timeout_s: float, reached: Reach, nodes: dict[NodeId, NodeReach], caller: Caller
) -> DeadlineExceededError:
    """Names nodes to the platform alone: a tenant learns how many there are, and no more (I2)."""
    metadata = {
        "version": str(version),
        "acknowledged_nodes": str(len(reached.acknowledged)),
        "expired_nodes": str(len(reached.expired)),
        "late_nodes": str(len(reached.late)),
    }
    named = ""
    if caller.is_platform:
        late = [f"{node} (at {nodes[node].applied_version})" for node in reached.late[:_NODES_NAMED_MAX]]
        named = f": {', '.join(late)}"
        metadata["late"] = ",".join(reached.late[:_NODES_NAMED_MAX])
    return DeadlineExceededError(
        f"policy {version} is not in force on {len(reached.late)} of {len(nodes)} nodes after {timeout_s:g} s{named}",
        reason="POLICY_NOT_EVERYWHERE",
        hint="the change is made, and late nodes follow or stop within their leases; wait again, or see"
        " `saltern node list`",
        metadata=metadata,
    )
