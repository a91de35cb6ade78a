"""Traces: nothing of OpenTelemetry without being asked, and no secret with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from saltern import errors, tracing
from saltern.admin.v1 import credentials_pb2, tenants_pb2
from saltern.admin_client import AdminClient, ApiKey
from saltern.exchange import exchange_api_key
from saltern.names import NamespaceId
from tests.support.control import control_plane, migrate

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    stop = tracing.start_with(SimpleSpanProcessor(exporter), "test")
    try:
        yield exporter
    finally:
        stop()


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'clients'}", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys, controlplane.server, dataplane.commands, saltern.client, saltern.cli.app\n"
        "from saltern import tracing\n"
        "tracing.start('x')()\n"
        "assert not tracing.is_on()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_without_the_extra_it_is_said_and_everything_goes_on() -> None:
    code = (
        "import sys\n"
        "class NotThere:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'opentelemetry':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, NotThere())\n"
        "import controlplane.server, dataplane.commands, saltern.client\n"
        "from saltern import tracing\n"
        "stop = tracing.start('x')\n"
        "with tracing.span('nothing'):\n"
        "    pass\n"
        "stop()\n"
    )
    result = run(code, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert result.returncode == 0, result.stderr
    assert "install the extra otel" in result.stderr


@pytest.mark.parametrize(
    ("environment", "is_wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_environment_decides(environment: dict[str, str], is_wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tracing.is_wanted() == is_wanted


def test_an_error_is_told_by_its_reason_and_not_by_what_it_says(spans: InMemorySpanExporter) -> None:
    with pytest.raises(errors.NotFoundError), tracing.span("work", size_bytes=3):
        raise errors.NotFoundError("no tenant hunter2", reason="NO_TENANT")
    (span,) = spans.get_finished_spans()
    assert span.attributes == {"size_bytes": 3, "error.type": "NO_TENANT"}
    assert "hunter2" not in span.to_json() and not span.events


async def test_a_call_is_a_part_of_its_callers_trace_and_no_secret_is_in_any(
    spans: InMemorySpanExporter, postgres: Any, tmp_path: Path
) -> None:
    import asyncio

    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path) as control:
            bootstrap = control.bootstrap_token()
            admin_key = await control.redeem()
            await control.add_tenant("acme", "chat", limit_bytes=2**20)
            writer = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
            endpoint = str(control.plane.endpoint)
            secrets = {bootstrap, admin_key, writer}
            spans.clear()

            def work() -> None:
                with tracing.span("application"):
                    grant = exchange_api_key(endpoint, writer, NamespaceId("chat"), timeout_ms=5000)
                    secrets.update({grant.access_token, *(salt.key.hex() for salt in grant.salts)})
                    with AdminClient(endpoint, ApiKey(admin_key)) as admin:
                        admin.call(admin.tenants.GetTenant, tenants_pb2.GetTenantRequest(name="tenants/acme"))
                        with pytest.raises(errors.NotFoundError):
                            request = tenants_pb2.GetTenantRequest(name="tenants/nobody-hunter2")
                            admin.call(admin.tenants.GetTenant, request)

            await asyncio.to_thread(work)
    found = {span.name: span for span in spans.get_finished_spans()}
    served = [span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER]
    root = found["application"]
    assert [span.name for span in served] == [
        "saltern.auth.v1.AuthService/ExchangeApiKey",
        "saltern.auth.v1.AuthService/ExchangeApiKey",
        "saltern.admin.v1.TenantService/GetTenant",
        "saltern.admin.v1.TenantService/GetTenant",
    ]
    assert {span.context.trace_id for span in served} == {root.context.trace_id}
    assert {span.parent.span_id for span in served if span.parent} == {root.context.span_id}
    allowed = {"rpc.system", "rpc.service", "rpc.method", "rpc.grpc.status_code", "error.type"}
    assert {name for span in served for name in span.attributes or {}} <= allowed
    assert [(span.attributes or {})["rpc.grpc.status_code"] for span in served] == [0, 0, 0, 5]
    for span in spans.get_finished_spans():
        told = span.to_json()
        assert not any(secret in told for secret in secrets) and "hunter2" not in told


async def test_what_a_caller_says_of_its_trace_is_taken_only_where_it_is_well_formed(
    spans: InMemorySpanExporter, postgres: Any, tmp_path: Path
) -> None:
    from saltern.auth.v1 import auth_pb2

    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path) as control:
            for traceparent in ("", "00-zz-11-01", "x" * 8000, f"00-{'0' * 32}-{'0' * 16}-01"):
                metadata = (("traceparent", traceparent), ("tracestate", "secret=hunter2"), ("baggage", "a=hunter2"))
                await control.auth.GetKeySet(auth_pb2.GetKeySetRequest(), metadata=metadata)
    served = [span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert len(served) == 4 and all(span.parent is None for span in served)
    assert not any("hunter2" in span.to_json() for span in served)
