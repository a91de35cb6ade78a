"""The row of a tenant about which a test wants to know no more than that it is there."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID, uuid4

from controlplane.db import models
from tenants.policy import TenantState


def tenant_row(tenant: str, now: datetime, uid: UUID | None = None) -> models.Tenant:
    """An active tenant, made at ``now``; parents of other rows: flush before those are added."""
    return models.Tenant(
        id=tenant,
        uid=uid or uuid4(),
        display_name="",
        state=TenantState.ACTIVE,
        min_issue_time=now,
        first_audit_sequence=1,
        create_time=now,
        update_time=now,
    )
