"""A database that is restored from a backup: nodes go by it at once, and nothing of the lost history comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
from structlog.testing import capture_logs

from controlplane.audit.checkpoint_keys import CheckpointKey, load_checkpoint_key
from controlplane.audit.checkpoint_sinks import FolderSink
from controlplane.audit.checkpoints import CheckpointWriter
from controlplane.clock import utc_now
from controlplane.db import models
from controlplane.restored import FILE_NAME, GAP, METHOD, RestoreWatch
from dataplane.control_client import ControlClient
from dataplane.registration import Registration
from saltern.admin.v1 import credentials_pb2, namespaces_pb2, tenants_pb2
from saltern.admin_client import ApiKey
from saltern.names import NodeId
from tenants.policy import TenantState
from tests.dataplane.test_policy_end_to_end import ACME, MIB, Sink
from tests.support.backups import dump, restore
from tests.support.control import Control, control_plane, migrate

NODE = NodeId("node-1")


@asynccontextmanager
async def node(endpoint: str, api_key: str, sink: Sink) -> AsyncIterator[None]:
    registration = Registration("node-1", "127.0.0.1:1", "127.0.0.1:2", "", "host", MIB, state_id="of the one folder")
    async with ControlClient(endpoint, ApiKey(api_key), registration, sink) as client:
        await client.join(20)
        following = asyncio.create_task(client.run())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.wait({following})


async def reaches(sink: Sink, condition: Callable[[Sink], bool]) -> None:
    async with asyncio.timeout(30), sink.changed:
        await sink.changed.wait_for(lambda: condition(sink))


async def lose(control: Control, metadata: Any) -> None:
    """Acts that the backup does not have."""
    await control.add_tenant("later", "chat")
    body = namespaces_pb2.Namespace(model_fingerprint="m", block_tokens=16, block_bytes=65536)
    request = namespaces_pb2.CreateNamespaceRequest(parent="tenants/acme", namespace_id="lost", namespace=body)
    await control.namespaces.CreateNamespace(request, metadata=metadata)


async def suspend(control: Control) -> None:
    request = tenants_pb2.SuspendTenantRequest(name="tenants/acme")
    await control.tenants.SuspendTenant(request, metadata=await control.bearer(control.admin_key))


async def test_i9_nodes_follow_a_restored_database_at_once_and_forget_what_it_does_not_know(
    postgres: Any, tmp_path: Path
) -> None:
    state_dir, backup, sink = tmp_path / "control", tmp_path / "saltern.dump", Sink()
    async with AsyncExitStack() as stack:
        database = stack.enter_context(postgres.fresh_database(migrate))
        restored = stack.enter_context(postgres.fresh_database())
        async with control_plane(database, state_dir) as control:
            admin_key = await control.redeem()
            await control.add_tenant("acme", "chat", limit_bytes=MIB)
            node_key = await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node-1")
            writer = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
            endpoint = control.plane.endpoint
            await asyncio.to_thread(dump, database.owner, backup)
            await stack.enter_async_context(node(str(endpoint), node_key, sink))
            await lose(control, await control.bearer(admin_key))
            issued = await control.exchange(writer, "chat")
            await reaches(sink, lambda sink: "lost" in sink.core.policy.tenants[ACME].namespaces)
        lost_version = sink.applied_version
        await asyncio.to_thread(restore, restored.owner, backup)

        # Nobody tells the control plane: another host, so it has not even the folder that knows. The node lives on.
        (state_dir / FILE_NAME).unlink()
        with capture_logs() as logs:
            control = await stack.enter_async_context(control_plane(restored, state_dir, listen=endpoint))
            control.admin_key = admin_key
            await reaches(sink, lambda sink: sink.applied_version > lost_version + GAP)
            assert set(sink.core.policy.tenants) == {ACME}
            assert set(sink.core.policy.tenants[ACME].namespaces) == {"chat"}
            # What was issued in the lost history ends with it, whoever may have revoked it there.
            ends_before_s = sink.core.policy.tenants[ACME].min_issue_time_s
            assert jwt.decode(issued.access_token, options={"verify_signature": False})["iat"] < ends_before_s
            await suspend(control)
            await reaches(sink, lambda sink: sink.core.policy.tenants[ACME].state is TenantState.SUSPENDED)
        assert [log["log_level"] for log in logs if "was restored" in log["event"]] == ["error"]
        (found,) = [event for event in await control.events() if event.method == METHOD]
        assert found.actor == "control-plane"


async def test_a_control_plane_finds_a_restore_by_what_it_has_seen_before(postgres: Any, tmp_path: Path) -> None:
    state_dir, backup = tmp_path / "control", tmp_path / "saltern.dump"
    with postgres.fresh_database(migrate) as database, postgres.fresh_database() as restored:
        async with control_plane(database, state_dir) as control:
            admin_key = await control.redeem()
            await asyncio.to_thread(dump, database.owner, backup)
            await control.add_tenant("acme", "chat")
            watch = RestoreWatch(control.database, state_dir)
            assert not await watch.look()
            seen = int((state_dir / FILE_NAME).read_text())
        await asyncio.to_thread(restore, restored.owner, backup)
        for _ in range(2):  # found once: the second start finds what the first one made of it
            async with control_plane(restored, state_dir) as control:
                control.admin_key = admin_key
                assert [event.method for event in await control.events()].count(METHOD) == 1
                assert int((state_dir / FILE_NAME).read_text()) > seen + GAP


async def test_a_version_that_is_only_ahead_of_one_look_is_no_restore(control: Control, tmp_path: Path) -> None:
    watch = RestoreWatch(control.database, tmp_path)
    await control.add_tenant("acme")
    await watch.told(1, NODE)
    await watch.told(2**62, NODE)  # no node gets there: one that says so must not use up the versions
    assert not await watch.look()
    assert METHOD not in [event.method for event in await control.events()]


async def test_i10_a_node_that_tells_of_restores_again_and_again_is_believed_once_and_named(
    control: Control, tmp_path: Path
) -> None:
    now = datetime.now(UTC)
    watch = RestoreWatch(control.database, tmp_path, lambda: now)
    async with control.database.transaction() as session:
        version = (await session.get_one(models.PolicyState, 1)).version
    for number, (minutes, believed) in enumerate(((0, 1), (1, 1), (59, 1), (61, 2)), start=1):
        now = datetime.now(UTC) + timedelta(minutes=minutes)
        await watch.told(version + 10 * number * GAP, NODE)
        found = [event for event in await control.events() if event.method == METHOD]
        assert len(found) == believed, minutes
        assert dict(found[0].after)["told_by"] == "nodes/node-1"


async def test_i11_a_restored_chain_is_not_signed_over_the_lost_one_and_begins_anew_in_a_new_folder(
    postgres: Any, tmp_path: Path
) -> None:
    state_dir, backup = tmp_path / "control", tmp_path / "saltern.dump"
    with postgres.fresh_database(migrate) as database, postgres.fresh_database() as restored:
        async with control_plane(database, state_dir) as control:
            await control.redeem()
            await asyncio.to_thread(dump, database.owner, backup)
            await control.add_tenant("acme")  # signed at the stop, and lost
        await asyncio.to_thread(restore, restored.owner, backup)
        async with control_plane(restored, state_dir) as control:

            async def key() -> CheckpointKey:
                return await load_checkpoint_key(control.database, control.key_encryption_key, utc_now)

            def writer(folder: Path) -> CheckpointWriter:
                return CheckpointWriter(control.database, key, FolderSink(folder))

            old, new = writer(state_dir / "audit-checkpoints"), writer(tmp_path / "after the restore")
            with capture_logs() as logs:
                assert [checkpoint.chain for checkpoint in await old.sign_moved()] == []
            assert "platform" in old.broken and "error" in {log["log_level"] for log in logs}
            assert "platform" in [checkpoint.chain for checkpoint in await new.sign_moved()]
            assert not new.broken
