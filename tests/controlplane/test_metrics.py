"""The control plane's metrics and readiness, over a real socket, on a real database that comes and goes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import psycopg.sql
import pytest
from sqlalchemy import update

import migrations
from controlplane import metrics as control_metrics
from controlplane.core import readiness as readiness_rules
from controlplane.db import ServiceScope, ServiceTask, models
from saltern.admin.v1 import credentials_pb2, tenants_pb2
from saltern.auth.v1 import auth_pb2
from saltern.node.v1 import node_pb2, node_pb2_grpc
from tests.support.control import Control, control_plane, migrate, refused
from tests.support.follower import following
from tests.support.scraping import Scrape, ask

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture
async def control(postgres, tmp_path: Path) -> AsyncIterator[Control]:  # type: ignore[no-untyped-def]
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path / "control") as running:
            await running.redeem()
            yield running


async def scrape(control: Control, *, openmetrics: bool = False) -> Scrape:
    return await asyncio.to_thread(
        Scrape, control.plane.metrics_endpoint, openmetrics=openmetrics, prefix="saltern_control_"
    )


async def test_calls_are_counted_by_method_and_code_and_unknown_ones_not_at_all(control: Control) -> None:
    await control.add_tenant("acme", "chat", limit_bytes=1024)
    request = tenants_pb2.GetTenantRequest(name="tenants/nobody")
    await refused(control.tenants.GetTenant(request, metadata=await control.bearer(control.admin_key)))
    await refused(control.tenants.GetTenant(request))
    await refused(control.exchange(f"sk-saltern-{'0' * 16}-{'A' * 43}"))
    for number in range(3):
        with pytest.raises(grpc.aio.AioRpcError):
            await control.channel.unary_unary(f"/made.up.Service/Method{number}")(b"")
    page = await scrape(control)
    assert page.value("requests_total", method="TenantService/CreateTenant", code="OK") == 1
    assert page.value("requests_total", method="TenantService/GetTenant", code="NOT_FOUND") == 1
    assert page.value("requests_total", method="TenantService/GetTenant", code="UNAUTHENTICATED") == 1
    assert page.value("requests_total", method="AuthService/ExchangeApiKey", code="UNAUTHENTICATED") == 1
    assert page.value("request_duration_seconds_count", method="TenantService/GetTenant") == 2
    assert "Method" not in "".join(page.label_values("method"))
    assert page.value("database_up") == 1 and page.value("policy_version") is not None
    assert control.admin_key not in page.text


async def test_nodes_are_counted_by_whether_they_report(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_metrics, "_KEEP_S", 0.0)
    key = await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node")
    endpoint = auth_pb2.NodeEndpoint(node_id="node-1", wire_endpoint="127.0.0.1:1", grpc_endpoint="127.0.0.1:2")
    register = node_pb2.RegisterNodeRequest(node_id="node-1", endpoint=endpoint)
    nodes: Any = node_pb2_grpc.NodeServiceStub(control.channel)
    await nodes.RegisterNode(register, metadata=await control.bearer(key))
    page = await scrape(control, openmetrics=True)
    assert (page.value("nodes", state="live"), page.value("nodes", state="lost")) == (1, 0)
    assert page.value("nodes_behind") == 1
    assert sum(page.value("health_state", state=state) or 0 for state in readiness_rules.ReadyState) == 1
    assert page.value("health_state", state="ready") == 1


async def test_without_its_database_it_is_alive_and_not_ready(
    postgres,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_metrics, "_KEEP_S", 0.0)
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path / "control") as control:
            endpoint = control.plane.metrics_endpoint
            assert (await asyncio.to_thread(ask, endpoint, "/readyz")).json == {"state": "ready", "reasons": []}
            allow(postgres, database.name, allowed=False)
            response = await asyncio.to_thread(ask, endpoint, "/readyz")
            assert response.status == 503 and response.json["reasons"][0]["reason"] == "DATABASE_UNAVAILABLE"
            assert (await asyncio.to_thread(ask, endpoint, "/livez")).status == 200
            assert (await scrape(control)).value("database_up") == 0
            allow(postgres, database.name, allowed=True)
            assert (await asyncio.to_thread(ask, endpoint, "/readyz")).status == 200


async def test_readiness_tells_degraded_from_unready(
    postgres,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What another control plane could do no better keeps this one in rotation; a database that refuses it does not."""
    monkeypatch.setattr(control_metrics, "_KEEP_S", 0.0)
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path / "control") as control:

            async def readiness() -> tuple[int, str, list[str]]:
                answer = await asyncio.to_thread(ask, control.plane.metrics_endpoint, "/readyz")
                return answer.status, answer.json["state"], [reason["reason"] for reason in answer.json["reasons"]]

            def do(statement: str) -> None:
                with postgres.server.connect("superuser", database.name) as superuser:
                    superuser.execute(statement)

            assert await readiness() == (200, "ready", [])
            monkeypatch.setattr(readiness_rules, "SLOW_MS", 0.0)
            assert await readiness() == (200, "degraded", ["DATABASE_SLOW"])
            monkeypatch.undo()
            monkeypatch.setattr(control_metrics, "_KEEP_S", 0.0)

            do("UPDATE alembic_version SET version_num = '9999'")
            assert await readiness() == (200, "degraded", ["SCHEMA_AHEAD"])
            do("COMMENT ON TABLE alembic_version IS NULL")
            assert await readiness() == (503, "unready", ["SCHEMA_TOO_NEW"])
            do("UPDATE alembic_version SET version_num = '0001'")
            assert await readiness() == (503, "unready", ["SCHEMA_BEHIND"])
            do(f"UPDATE alembic_version SET version_num = '{migrations.head_revision()}'")
            assert await readiness() == (200, "ready", [])

            def make_read_only(value: str) -> None:
                """As for a standby that was told to: of connections that are made from now on."""
                with postgres.server.connect("superuser", "postgres") as superuser:
                    superuser.execute(f"ALTER DATABASE {database.name} SET default_transaction_read_only = {value}")
                    allow(postgres, database.name, allowed=False)
                    allow(postgres, database.name, allowed=True)

            make_read_only("on")
            assert await readiness() == (503, "unready", ["DATABASE_READ_ONLY"])
            make_read_only("off")
            status, _, reasons = await readiness()
            # What went round just then (the keeper of key-encryption keys) says so until it has gone round again.
            assert status == 200 and set(reasons) <= {"KEY_ENCRYPTION_FAILING"}


def allow(postgres, database: str, *, allowed: bool) -> None:  # type: ignore[no-untyped-def]
    """Let connections to ``database`` in, or cut those that there are and let no other in."""
    with postgres.server.connect("superuser", "postgres") as connection:
        name = psycopg.sql.Identifier(database)
        connection.execute(
            psycopg.sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS {}").format(name, psycopg.sql.Literal(allowed))
        )
        if not allowed:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (database,))


async def test_every_name_is_documented_and_every_documented_name_is_exposed(control: Control) -> None:
    page = await scrape(control)
    declared = set(re.findall(r"^# TYPE (saltern_control_\w+)", page.text, re.M))
    documented = set(re.findall(r"^\| `(saltern_control_\w+)` \|", DOCS.read_text(), re.M))
    assert declared == documented


async def test_a_node_that_falls_behind_or_is_silent_is_shown_by_name(control: Control) -> None:
    as_node = await control.bearer(await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node"))
    async with following(control, as_node, "node-7") as node:
        await node.answer()
        await control.add_tenant("acme")
        async with control.database.transaction(ServiceScope(ServiceTask.LEASES)) as session:
            await session.execute(
                update(models.Node).values(last_report_time=models.Node.last_report_time - timedelta(seconds=60))
            )
        page = await scrape(control)
        assert page.value("node_policy_lag", node="node-7") >= 1
        assert page.value("node_report_age_seconds", node="node-7") >= 60
        answer = await asyncio.to_thread(ask, control.plane.metrics_endpoint, "/readyz")
        assert answer.status == 200
        assert answer.json["state"] == "degraded"
        assert [reason["reason"] for reason in answer.json["reasons"]] == ["NODES_LATE"]
        assert "node-7" in answer.json["reasons"][0]["message"]
