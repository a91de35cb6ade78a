"""Two control planes on one database: each is restarted under load, and nobody who tries again is turned away."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest

from saltern.admin.v1 import credentials_pb2, credentials_pb2_grpc, tenants_pb2, tenants_pb2_grpc
from saltern.auth.v1 import auth_pb2, auth_pb2_grpc
from saltern.errors import UnavailableError
from saltern.node.v1 import node_pb2, node_pb2_grpc
from saltern.rpc_errors import error_from_rpc
from tests.controlplane.test_server import Served, serving, urls
from tests.support.backups import libpq_url
from tests.support.control import bearer
from tests.support.scraping import ask

TRIES = 5


class Pair:
    """Two control planes at fixed addresses, and a channel that knows both, as behind one DNS name."""

    def __init__(self, folder: Path, database: Any, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._environment = urls(database) | {"SALTERN_KEY_ENCRYPTION_KEY": "ab" * 32}
        self._ports = {name: _free_port() for name in "ab"}
        self.served = {name: self._start(name) for name in "ab"}

    @property
    def target(self) -> str:
        return "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in self._ports.values())

    def start(self, name: str) -> None:
        self.served[name].ready_file.unlink(missing_ok=True)  # one that was killed has left it
        self.served[name] = self._start(name)
        self.served[name].wait_ready()

    def _start(self, name: str) -> Served:
        listen = f"127.0.0.1:{self._ports[name]}"
        return self._stack.enter_context(
            serving(self._folder / name, **self._environment | {"SALTERN_CONTROL_LISTEN": listen})
        )

    def bootstrap_token(self) -> str:
        (file,) = [path for name in "ab" if (path := self._folder / name / "bootstrap-token").exists()]
        return file.read_text().strip()


async def tried(call: Callable[[], Awaitable[Any]]) -> tuple[Any, int]:
    """The answer, and how many tries it took: who is told to by the error tries again, a little later each time."""
    for number in range(1, TRIES + 1):
        try:
            return await call(), number
        except grpc.aio.AioRpcError as error:
            if not isinstance(error_from_rpc(error), UnavailableError) or number == TRIES:
                raise
            await asyncio.sleep(0.1 * 2**number)
    raise AssertionError("one of the two has happened")


class Load:
    """Exchanges and acts without a pause; every failure past the tries ends the test."""

    def __init__(self, channel: grpc.aio.Channel, admin_key: str) -> None:
        self._auth: Any = auth_pb2_grpc.AuthServiceStub(channel)
        self._tenants: Any = tenants_pb2_grpc.TenantServiceStub(channel)
        self._admin_key = admin_key
        self.tries: list[int] = []
        self.tenants: list[str] = []
        self._stopped = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._exchange()) for _ in range(4)] + [asyncio.create_task(self._act())]
        try:
            yield
            before = len(self.tries), len(self.tenants)
            async with asyncio.timeout(30):  # it goes on at the end too
                while len(self.tries) < before[0] + 8 or len(self.tenants) < before[1] + 2:
                    for task in tasks:
                        assert not task.done() or task.result() is None
                    await asyncio.sleep(0.01)
        finally:
            self._stopped = True
            await asyncio.gather(*tasks)

    async def token(self) -> str:
        request = auth_pb2.ExchangeApiKeyRequest(api_key=self._admin_key, audience=auth_pb2.AUDIENCE_CONTROL)
        answer, tries = await tried(lambda: self._auth.ExchangeApiKey(request, timeout=10))
        self.tries.append(tries)
        return str(answer.access_token)

    async def _exchange(self) -> None:
        while not self._stopped:
            await self.token()

    async def _act(self) -> None:
        metadata = bearer(await self.token())
        while not self._stopped:
            tenant = f"t{len(self.tenants)}"
            # An id of the request: a try whose answer was lost is not done twice, and is answered as it was.
            request = tenants_pb2.CreateTenantRequest(
                tenant_id=tenant,
                tenant=tenants_pb2.Tenant(),
                request_id=f"00000000-0000-4000-8000-{len(self.tenants):012x}",
            )
            create = partial(self._tenants.CreateTenant, request, metadata=metadata, timeout=10)
            answer, tries = await tried(create)
            assert answer.name == f"tenants/{tenant}"
            self.tries.append(tries)
            self.tenants.append(tenant)


async def leases_are_looked_after(target: str, node_key: str, owner: Any, node_id: str) -> None:
    """Whoever leads does what is due: a process that waits for another one's lease is let in when that is over."""
    async with grpc.aio.insecure_channel(target) as channel:
        auth: Any = auth_pb2_grpc.AuthServiceStub(channel)
        nodes: Any = node_pb2_grpc.NodeServiceStub(channel)
        exchange = auth_pb2.ExchangeApiKeyRequest(api_key=node_key, audience=auth_pb2.AUDIENCE_CONTROL)
        answer, _ = await tried(lambda: auth.ExchangeApiKey(exchange, timeout=10))
        endpoint = auth_pb2.NodeEndpoint(node_id=node_id, wire_endpoint="127.0.0.1:1", grpc_endpoint="127.0.0.1:2")
        for home in ("one folder", "another"):
            request = node_pb2.RegisterNodeRequest(node_id=node_id, endpoint=endpoint, state_id=home)
            await nodes.RegisterNode(request, metadata=bearer(answer.access_token), timeout=10)
    with psycopg.connect(libpq_url(owner), autocommit=True) as connection:
        connection.execute("UPDATE nodes SET lease_from_time = now() WHERE id = %s", [node_id])
        async with asyncio.timeout(30):
            while connection.execute(
                "SELECT 1 FROM nodes WHERE id = %s AND lease_from_time IS NOT NULL", [node_id]
            ).fetchone():
                await asyncio.sleep(0.05)


@pytest.mark.timeout(180)
async def test_each_of_two_is_restarted_under_load_and_no_call_that_is_tried_again_fails(
    postgres: Any, tmp_path: Path
) -> None:
    with postgres.fresh_database() as database, ExitStack() as stack:
        pair = Pair(tmp_path, database, stack)
        await asyncio.gather(*(asyncio.to_thread(served.wait_ready) for served in pair.served.values()))
        async with grpc.aio.insecure_channel(pair.target, options=[("grpc.max_reconnect_backoff_ms", 1000)]) as channel:
            auth: Any = auth_pb2_grpc.AuthServiceStub(channel)
            redeem = auth_pb2.RedeemBootstrapTokenRequest(bootstrap_token=pair.bootstrap_token())
            admin_key = (await auth.RedeemBootstrapToken(redeem)).secret
            load = Load(channel, admin_key)
            credentials: Any = credentials_pb2_grpc.CredentialServiceStub(channel)
            node_keys = []
            for node_id in ("node-0", "node-1"):
                request = credentials_pb2.CreateApiKeyRequest(
                    api_key_id=node_id, api_key=credentials_pb2.ApiKey(role=credentials_pb2.ROLE_NODE, node_id=node_id)
                )
                made = await credentials.CreateApiKey(request, metadata=bearer(await load.token()))
                node_keys.append(made.secret)
            async with load.running():
                for number, (name, how) in enumerate({"a": signal.SIGTERM, "b": signal.SIGKILL}.items()):
                    served = pair.served[name]
                    served.process.send_signal(how)
                    status, printed = await asyncio.to_thread(served.end)
                    assert status == (0 if how is signal.SIGTERM else -how), printed
                    # What one of them must do for all is done by the other.
                    await leases_are_looked_after(pair.target, node_keys[number], database.owner, f"node-{number}")
                    await asyncio.to_thread(pair.start, name)
            stub: Any = tenants_pb2_grpc.TenantServiceStub(channel)
            listed = await stub.ListTenants(
                tenants_pb2.ListTenantsRequest(page_size=1000), metadata=bearer(await load.token())
            )
            assert {tenant.name for tenant in listed.tenants} >= {f"tenants/{tenant}" for tenant in load.tenants}


async def test_readiness_turns_before_the_door_closes(postgres: Any, tmp_path: Path) -> None:
    """Whoever spreads calls sees it before the first is refused; an answer that is being made is still given."""
    with postgres.fresh_database() as database, serving(tmp_path, **urls(database)) as served:
        await asyncio.to_thread(served.wait_ready)
        ready = json.loads(served.ready_file.read_text())
        assert (await asyncio.to_thread(ask, ready["metrics_endpoint"], "/readyz")).status == 200
        with psycopg.connect(libpq_url(database.owner)) as holder:
            # The redemption waits for this lock, and the drain for the redemption.
            holder.execute("SELECT set_config('saltern.tenant', '*', true)")
            holder.execute("LOCK TABLE bootstrap IN ACCESS EXCLUSIVE MODE")
            async with grpc.aio.insecure_channel(ready["endpoint"]) as channel:
                auth: Any = auth_pb2_grpc.AuthServiceStub(channel)
                token = (tmp_path / "bootstrap-token").read_text().strip()
                call = auth.RedeemBootstrapToken(auth_pb2.RedeemBootstrapTokenRequest(bootstrap_token=token))
                waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'bootstrap'::regclass"
                async with asyncio.timeout(20):
                    while holder.execute(waiting).fetchone() == (0,):
                        await asyncio.sleep(0.02)
                served.process.send_signal(signal.SIGTERM)
                answer = None
                async with asyncio.timeout(20):
                    while answer is None or answer.status == 200:
                        answer = await asyncio.to_thread(ask, ready["metrics_endpoint"], "/readyz")
                assert answer.status == 503 and answer.json["state"] == "draining"
                served.process.send_signal(signal.SIGTERM)  # who is impatient changes nothing
                holder.rollback()
                assert (await call).secret
        status, _ = await asyncio.to_thread(served.end)
        assert status == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
