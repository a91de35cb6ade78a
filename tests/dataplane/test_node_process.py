"""``saltern serve node`` as a process, against a real control plane on a real database."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from saltern.admin.v1 import credentials_pb2, tenants_pb2, usage_pb2
from saltern.endpoints import Endpoint
from saltern.errors import PermissionDeniedError, UnauthenticatedError
from tests.support.control import Control, control_plane, migrate
from tests.support.served_node import DEADLINE_S, connect, serve_node
from tests.support.wire_client import WireClient, block, key


@pytest.fixture
async def control(postgres, tmp_path: Path) -> AsyncIterator[Control]:  # type: ignore[no-untyped-def]
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path / "control") as running:
            await running.redeem()
            await running.add_tenant("acme", "chat", limit_bytes=16 * 1024 * 1024)
            yield running


async def node_key(control: Control) -> str:
    return await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node")


async def writer_token(control: Control) -> str:
    writer = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
    return (await control.exchange(writer, "chat")).access_token


async def test_a_node_serves_what_the_control_plane_says_and_reports_what_it_holds(
    control: Control, tmp_path: Path
) -> None:
    token = await writer_token(control)
    with serve_node(tmp_path / "node", str(control.plane.endpoint), await node_key(control)) as node:
        ready = await node.ready()
        with connect(ready["wire_endpoint"]) as client:
            await asyncio.to_thread(client.hello, token)
            assert client.put({key(1): block(1)}).codes == b"\x00"
            assert client.get(key(1)) == {key(1): block(1)}
            await usage_reaches(control, 4096)

            suspend = tenants_pb2.SuspendTenantRequest(name="tenants/acme")
            await control.tenants.SuspendTenant(suspend, metadata=await control.bearer(control.admin_key))
            await refused_soon(client, "TENANT_SUSPENDED")
            delete = tenants_pb2.DeleteTenantRequest(name="tenants/acme")
            await control.tenants.DeleteTenant(delete, metadata=await control.bearer(control.admin_key))
            await refused_soon(client, "NAMESPACE_NOT_AVAILABLE")

            assert Path(ready["shm_path"]).is_socket()
            node.process.send_signal(signal.SIGTERM)
            status, printed = await node.end()
            assert client.is_closed()
        assert status == 0, printed
        assert not node.ready_file.exists()
        assert not Path(ready["shm_path"]).exists()
        assert token not in printed
        assert "sk-saltern" not in printed


async def test_i9_a_node_serves_on_without_its_control_plane_and_finds_it_again(  # type: ignore[no-untyped-def]
    postgres, tmp_path: Path
) -> None:
    with postgres.fresh_database(migrate) as database, ExitStack() as stack:
        async with control_plane(database, tmp_path / "control") as first:
            admin_key = await first.redeem()
            await first.add_tenant("acme", "chat", limit_bytes=16 * 1024 * 1024)
            token, endpoint = await writer_token(first), first.plane.endpoint
            node = stack.enter_context(serve_node(tmp_path / "node", str(endpoint), await node_key(first)))
            ready = await node.ready()
        client = stack.enter_context(connect(ready["wire_endpoint"]))
        await asyncio.to_thread(client.hello, token)
        assert client.put({key(1): block(1)}).codes == b"\x00"
        listen = Endpoint(endpoint.host, endpoint.port)
        async with control_plane(database, tmp_path / "control", listen=listen) as second:
            second.admin_key = admin_key
            await usage_reaches(second, 4096)
            delete = tenants_pb2.DeleteTenantRequest(name="tenants/acme")
            await second.tenants.DeleteTenant(delete, metadata=await second.bearer(admin_key))
            await refused_soon(client, "NAMESPACE_NOT_AVAILABLE")


@pytest.mark.parametrize(
    ("case", "status", "words"),
    [
        ("unknown key", 4, "API key is not valid"),
        ("tenant's key", 3, "belongs to tenant 'acme'"),
        ("no key file", 3, "no API key file"),
        ("port taken", 5, "the port is taken"),
        ("unreachable", 7, "cannot reach"),
        ("not loopback", 5, "in plain text"),
    ],
)
async def test_a_node_that_cannot_start_says_why_in_one_line(
    control: Control, tmp_path: Path, case: str, status: int, words: str
) -> None:
    secret: str | None = await node_key(control)
    endpoint, arguments = str(control.plane.endpoint), ["--control-wait", "0"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if case == "unknown key":
            secret = f"sk-saltern-{'0' * 16}-{'A' * 43}"
        elif case == "tenant's key":
            secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
        elif case == "no key file":
            secret = None
        elif case == "port taken":
            arguments += ["--listen", f"127.0.0.1:{taken.getsockname()[1]}"]
        elif case == "unreachable":
            with socket.create_server(("127.0.0.1", 0)) as closed:
                endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
        else:
            arguments += ["--listen", "0.0.0.0:0"]
        with serve_node(tmp_path / "node", endpoint, secret, *arguments) as node:
            code, printed = await node.end()
    assert code == status, printed
    lines = [line for line in printed.splitlines() if not line.startswith("{")]
    assert words in lines[0]
    assert lines[0].startswith("error: ") and lines[1].startswith("hint: ") and len(lines) == 2
    assert "sk-saltern-" not in printed


async def usage_reaches(control: Control, used_bytes: int) -> None:
    """Wait until the control plane knows that acme holds ``used_bytes``."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            request = usage_pb2.GetUsageRequest(tenant="tenants/acme")
            response = await control.usage.GetUsage(request, metadata=await control.bearer(control.admin_key))
            if any(tier.used_bytes == used_bytes for tier in response.tiers):
                return
            await asyncio.sleep(0.1)


async def refused_soon(client: WireClient, reason: str) -> None:
    """Wait until the open session is refused for ``reason``."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                client.get(key(1))
            except PermissionDeniedError as error:
                if error.reason == reason:
                    return
            await asyncio.sleep(0.02)


async def kept_by_a_node(control: Control, folder: Path) -> tuple[str, str]:
    """Start a node, let it keep its policy in ``folder`` and kill it; return a writer's token and the node's key."""
    token, secret = await writer_token(control), await node_key(control)
    with serve_node(folder, str(control.plane.endpoint), secret) as node:
        await node.ready()  # written after the policy was applied; kept a moment later
        async with asyncio.timeout(DEADLINE_S):
            while not (folder / "policy.snapshot").exists():
                await asyncio.sleep(0.02)
        node.process.kill()
        await node.end()
    (folder / "ready.json").unlink()
    return token, secret


async def test_i9_a_node_restarted_without_its_control_plane_serves_the_kept_policy(  # type: ignore[no-untyped-def]
    postgres, tmp_path: Path
) -> None:
    folder = tmp_path / "node"
    with postgres.fresh_database(migrate) as database, ExitStack() as stack:
        async with control_plane(database, tmp_path / "control") as first:
            admin_key = await first.redeem()
            await first.add_tenant("acme", "chat", limit_bytes=16 * 1024 * 1024)
            token, secret = await kept_by_a_node(first, folder)
            endpoint = first.plane.endpoint
        node = stack.enter_context(serve_node(folder, str(endpoint), secret, "--control-wait", "0"))
        ready = await node.ready()
        client = stack.enter_context(connect(ready["wire_endpoint"]))
        await asyncio.to_thread(client.hello, token)
        assert client.put({key(1): block(1)}).codes == b"\x00"
        assert client.get(key(1)) == {key(1): block(1)}
        with connect(ready["wire_endpoint"]) as stranger, pytest.raises(UnauthenticatedError):
            await asyncio.to_thread(stranger.hello, token[:-8] + "AAAAAAAA")
        health = await asyncio.to_thread(readiness, ready["metrics_endpoint"])
        assert "CONTROL_PLANE_LOST" in health

        listen = Endpoint(endpoint.host, endpoint.port)
        async with control_plane(database, tmp_path / "control", listen=listen) as second:
            second.admin_key = admin_key
            await usage_reaches(second, 4096)
            delete = tenants_pb2.DeleteTenantRequest(name="tenants/acme")
            await second.tenants.DeleteTenant(delete, metadata=await second.bearer(admin_key))
            await refused_soon(client, "NAMESPACE_NOT_AVAILABLE")
        node.process.send_signal(signal.SIGTERM)
        status, printed = await node.end()
    assert status == 0, printed
    assert "serving the kept policy" in printed
    assert token not in printed


def readiness(endpoint: str) -> str:
    """What ``/readyz`` says, where the node is ready."""
    with urllib.request.urlopen(f"http://{endpoint}/readyz", timeout=10) as response:
        return response.read().decode()


async def test_i9_the_kept_policy_is_served_for_the_stated_window_only(control: Control, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    _, secret = await kept_by_a_node(control, folder)
    policy = folder / "policy.snapshot"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
    arguments = ("--control-wait", "0", "--policy-max-age", "1h")

    def set_age(age_s: float) -> None:
        os.utime(policy, (time.time() - age_s,) * 2)

    set_age(3600 - 5)
    with serve_node(folder, endpoint, secret, *arguments) as node:
        await node.ready()
        status, printed = await node.end()
    assert status == 7 and "has not answered for 3600 s" in printed, printed
    set_age(3601)
    with serve_node(folder, endpoint, secret, *arguments) as node:
        status, printed = await node.end()
    assert status == 7 and "KEPT_POLICY_TOO_OLD" in printed and "cannot reach" in printed, printed
    set_age(0)
    policy.chmod(0o644)
    with serve_node(folder, endpoint, secret, *arguments) as node:
        status, printed = await node.end()
    assert status == 7 and "KEPT_POLICY_EXPOSED" in printed, printed
