"""Every act and every denial has its row (I11): a catalogue of all methods, from their descriptors.

A new method fails here until it has its line: what it is asked, and in which chains it leaves exactly one row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from sqlalchemy import select

from controlplane import admin as services
from controlplane.db import models
from controlplane.server import SERVICE_NAMES
from saltern.admin.v1 import audit_pb2, credentials_pb2, policy_pb2, usage_pb2
from saltern.rpc_errors import error_from_rpc
from tenants.roles import Role
from tests.controlplane.admin.test_authorisation import PLATFORM_METHODS, TENANT_METHODS, prepare_again
from tests.support.admin import PLATFORM, Admin, Metadata, calling

ROOT = Path(__file__).resolve().parents[2]
#: What only reads; everything else changes something, whatever it is called.
READS = ("Get", "List", "Export", "WaitFor")
#: Acts that leave rows elsewhere than in the chain of the tenant that they are about, or in more chains than that.
CHAINS: dict[str, set[str]] = {
    "CreateTenant": {"new"},
    "AcceptInvitation": {"acme", "owner"},
    "DeclineInvitation": {"acme", "owner"},
}
#: Methods that this module does not call, and the tests of their rows.
ELSEWHERE: dict[str, str] = {
    "AuthService/ExchangeApiKey": "tests/controlplane/auth/test_exchange_queue.py::"
    "test_i11_of_many_at_a_time_each_has_its_outcome_and_its_event",
    "AuthService/ExchangeToken": "tests/controlplane/auth/test_exchange_token.py::"
    "test_i11_each_exchange_and_each_attempt_is_in_the_tenants_trail_without_the_token",
    "AuthService/RedeemBootstrapToken": "tests/controlplane/auth/test_bootstrap.py::"
    "test_i11_the_redemption_is_audited_and_so_are_attempts",
    "NodeService/RegisterNode": "tests/controlplane/node/test_node_identity.py::"
    "test_i11_each_attempt_to_be_another_node_is_audited",
    # They change no row that an administrator could: what a node says of itself, every two seconds. What becomes of it,
    # an hour's usage, has a row when the hour is closed.
    "NodeService/StreamPolicy": "tests/controlplane/node/test_node_identity.py::"
    "test_i11_each_attempt_to_be_another_node_is_audited",
    "NodeService/ReportUsage": "tests/controlplane/node/test_node_identity.py::"
    "test_i11_each_attempt_to_be_another_node_is_audited",
    "KeyEncryptionKeyService/RotateKeyEncryptionKey": "tests/controlplane/key_encryption/test_service.py::"
    "test_a_key_is_rotated_and_removed_only_when_nothing_is_under_it",
    "KeyEncryptionKeyService/RemoveKeyEncryptionKey": "tests/controlplane/key_encryption/test_service.py::"
    "test_a_key_is_rotated_and_removed_only_when_nothing_is_under_it",
    # Public keys, for whoever verifies tokens; it needs no token itself.
    "AuthService/GetKeySet": "tests/controlplane/auth/test_exchange.py::"
    "test_the_key_set_verifies_and_has_the_shape_of_a_jwk_set",
}
#: Requests of reading methods that the tables of authorisation do not have, as a tenant's caller sends them.
OTHER_READS: dict[str, Any] = {
    "ExportAuditEvents": audit_pb2.ExportAuditEventsRequest(parent="tenants/acme"),
    "ListCheckpointKeys": audit_pb2.ListCheckpointKeysRequest(),
    "ListUsages": usage_pb2.ListUsagesRequest(),
    "ListUsageRecords": usage_pb2.ListUsageRecordsRequest(parent="tenants/acme"),
    "ExportUsageRecords": usage_pb2.ExportUsageRecordsRequest(),
    "WaitForPolicy": policy_pb2.WaitForPolicyRequest(),
}
#: Denied only to credentials of the platform that are no administrator's: what it tells is nobody's in particular.
DENIED_TO_NODES = {"WaitForPolicy", "ListCheckpointKeys"}


def all_methods() -> list[MethodDescriptor]:
    pool = descriptor_pool.Default()
    return [method for service in SERVICE_NAMES for method in pool.FindServiceByName(service).methods]


def short(method: MethodDescriptor) -> str:
    return f"{method.containing_service.name}/{method.name}"


def administrative() -> Iterator[MethodDescriptor]:
    for method in all_methods():
        if method.containing_service.full_name in services.SERVICE_NAMES:
            yield method


def requests_about(tenant: str) -> dict[str, Any]:
    """A request of each administrative method, by the method's name: of a tenant's own, or else of the platform's."""
    of_platform = {name: request for _, name, _, request in PLATFORM_METHODS}
    return of_platform | {name: request(tenant) for _, name, _, request in TENANT_METHODS}


async def call(admin: Admin, method: MethodDescriptor, request: Any, metadata: Metadata) -> str:
    """Call a method; the reason that it is refused for, empty where it is not."""
    response_type = message_factory.GetMessageClass(method.output_type)
    path = f"/{method.containing_service.full_name}/{method.name}"
    kinds: Any = admin.channel.unary_stream if method.server_streaming else admin.channel.unary_unary
    stub = kinds(
        path, request_serializer=type(request).SerializeToString, response_deserializer=response_type.FromString
    )
    try:
        if method.server_streaming:
            async for _ in stub(request, metadata=metadata):
                pass
        else:
            await stub(request, metadata=metadata)
    except Exception as error:
        return error_from_rpc(error).reason  # type: ignore[arg-type]
    return ""


async def rows_since(admin: Admin, method: MethodDescriptor, before: Counter[str]) -> list[models.AuditEvent]:
    """Rows of ``method`` beyond the first ``before`` of each chain."""
    rows = [row for chain in await chains(admin) for row in (await admin.events(chain))[before[chain] :]]
    return [row for row in rows if row.method == f"{method.containing_service.full_name}/{method.name}"]


async def chains(admin: Admin) -> set[str]:
    async with admin.database.transaction() as session:
        return set(await session.scalars(select(models.AuditEvent.chain)))


async def lengths(admin: Admin) -> Counter[str]:
    return Counter({chain: len(await admin.events(chain)) for chain in await chains(admin)})


def test_every_method_is_in_the_catalogue() -> None:
    known = requests_about("acme").keys() | OTHER_READS.keys()
    missing = [short(m) for m in all_methods() if m.name not in known and short(m) not in ELSEWHERE]
    assert missing == [], "give each a line here: what it is asked, and where its rows are"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_tested_elsewhere_is(name: str) -> None:
    assert name in map(short, all_methods())
    file, _, test = ELSEWHERE[name].partition("::")
    assert re.search(rf"^(async )?def {test}\b", (ROOT / file).read_text(), re.MULTILINE)


@pytest.mark.timeout(180)
async def test_i11_every_act_leaves_one_row_in_each_chain_that_it_touches_and_reading_none(admin: Admin) -> None:
    await admin.register_node("node-1", 1 << 30)
    await admin.create_api_key("", "node", credentials_pb2.ROLE_NODE)
    await prepare_again(admin)
    platform = {name for _, name, _, _ in PLATFORM_METHODS} - {name for _, name, _, _ in TENANT_METHODS}
    for method in administrative():
        if short(method) in ELSEWHERE:
            continue
        if method.name not in platform and not method.name.startswith(READS):
            await prepare_again(admin)
        before = await lengths(admin)
        request = requests_about("acme").get(method.name) or OTHER_READS[method.name]
        assert await call(admin, method, request, PLATFORM) == "", short(method)
        rows = Counter(row.chain for row in await rows_since(admin, method, before))
        if method.name.startswith(READS):
            assert rows.total() == 0, f"{short(method)} reads, and has left a row"
            continue
        expected = CHAINS.get(method.name, {"platform"} if method.name in platform else {"acme"})
        assert rows == Counter(expected), f"{short(method)} has left rows in {dict(rows)}"
    for chain in await chains(admin):
        assert await admin.chain_faults(chain) == []


@pytest.mark.timeout(180)
async def test_i11_every_denial_leaves_one_row_in_the_chain_of_whoever_tried_and_says_of_what(admin: Admin) -> None:
    await prepare_again(admin)
    for method in administrative():
        request = requests_about("acme").get(method.name) or OTHER_READS[method.name]
        caller = calling(Role.NODE) if method.name in DENIED_TO_NODES else calling(Role.READER, "owner")
        chain = "platform" if method.name in DENIED_TO_NODES else "owner"
        admin.clock.now += timedelta(minutes=2)  # another window of the limit on rows of denials
        before = await lengths(admin)
        assert await call(admin, method, request, caller), f"{short(method)} is allowed to anybody"
        rows = await rows_since(admin, method, before)
        assert [(row.chain, row.outcome) for row in rows] == [(chain, models.AuditOutcome.DENIED)], short(method)
        assert rows[0].reason, short(method)
        assert rows[0].resource or not re.search(r"acme|new|node-1", str(request)), f"{short(method)}: denied of what?"
    for chain in await chains(admin):
        assert await admin.chain_faults(chain) == []
