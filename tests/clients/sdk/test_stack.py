"""The client against the real control plane, database and node: from an API key to bytes and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from saltern.admin.v1 import credentials_pb2
from saltern.async_client import AsyncClient
from saltern.client import Client
from saltern.credentials import ApiKeyCredentials
from saltern.errors import PermissionDeniedError, UnauthenticatedError
from saltern.keys import BlockHash
from saltern.results import Error, Hit, Miss, Stored
from tests.conftest import SessionPostgres
from tests.support.clients import DEADLINE_MS
from tests.support.control import Control, control_plane, migrate
from tests.support.real_node import real_node

HASHES = [BlockHash(bytes([number]) * 32) for number in range(20)]
BLOCKS = [bytes([number]) * 50_000 for number in range(20)]


@asynccontextmanager
async def control_with_tenants(postgres: SessionPostgres, folder: Path) -> AsyncIterator[Control]:
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, folder) as control:
            await control.redeem()
            for tenant in ("acme", "bravo"):
                await control.add_tenant(tenant, "chat", limit_bytes=16 << 20)
            yield control


async def test_i2_two_tenants_from_api_key_to_bytes_and_back(postgres: SessionPostgres, tmp_path: Path) -> None:
    async with control_with_tenants(postgres, tmp_path) as control:
        endpoint = str(control.plane.endpoint)
        keys = {tenant: await control.add_api_key(credentials_pb2.ROLE_WRITER, tenant) for tenant in ("acme", "bravo")}
        node_key = await control.add_api_key(credentials_pb2.ROLE_NODE)

        def use() -> None:
            with real_node(endpoint, node_key, tmp_path):
                with (
                    Client(control=endpoint, api_key=keys["acme"], namespace="chat", deadline_ms=DEADLINE_MS) as acme,
                    Client(control=endpoint, api_key=keys["bravo"], namespace="chat", deadline_ms=DEADLINE_MS) as bravo,
                ):
                    assert (acme.tenant, acme.namespace, acme.epoch) == ("acme", "chat", 1)
                    assert (acme.block_tokens, acme.block_bytes) == (16, 65536)
                    mine, theirs = acme.block_keys(HASHES), bravo.block_keys(HASHES)
                    assert not {*mine} & {*theirs}
                    assert acme.put_many(zip(mine, BLOCKS, strict=True)) == [Stored()] * 20
                    assert acme.transport == "shm"
                    got = acme.get_many(mine)
                    assert [result.payload for result in got if isinstance(result, Hit)] == BLOCKS
                    # Even with acme's own keys in hand.
                    assert bravo.get_many(mine) == bravo.get_many(theirs) == [Miss()] * 20
                    assert bravo.longest_prefix(mine) == 0
                    assert bravo.delete(mine).count == 0
                    assert acme.longest_prefix(mine) == 20

        await asyncio.to_thread(use)


async def test_i1_only_valid_keys_and_own_namespaces_make_a_client(postgres: SessionPostgres, tmp_path: Path) -> None:
    async with control_with_tenants(postgres, tmp_path) as control:
        endpoint = str(control.plane.endpoint)
        secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
        forged = secret[:-43] + "A" * 43
        for api_key in (forged, "garbage", ""):
            with pytest.raises(UnauthenticatedError) as caught:
                await AsyncClient.connect(control=endpoint, api_key=api_key, namespace="chat")
            assert api_key == "" or api_key not in str(caught.value)
        with pytest.raises(PermissionDeniedError):
            await AsyncClient.connect(control=endpoint, api_key=secret, namespace="no-such")

        credentials = await asyncio.to_thread(ApiKeyCredentials, control=endpoint, api_key=secret, namespace="chat")
        async with AsyncClient.from_credentials(credentials, deadline_ms=DEADLINE_MS) as client:
            await control.delete_api_key("tenants/acme/apiKeys/key")
            token = credentials._current.access_token
            credentials.reject(token)  # as after a node refused it
            [result] = await client.get_many([client.block_key(HASHES[0])])
            assert isinstance(result, Error) and isinstance(result.error, UnauthenticatedError)


async def test_i9_clients_go_on_without_the_control_plane(postgres: SessionPostgres, tmp_path: Path) -> None:
    ready, gone = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    made: list[Client] = []

    def use(endpoint: str, api_key: str, node_key: str) -> None:
        with real_node(endpoint, node_key, tmp_path):
            with Client(control=endpoint, api_key=api_key, namespace="chat", deadline_ms=DEADLINE_MS) as client:
                made.append(client)
                keys = client.block_keys(HASHES)
                assert client.put_many(zip(keys, BLOCKS, strict=True)) == [Stored()] * 20
                loop.call_soon_threadsafe(ready.set)
                asyncio.run_coroutine_threadsafe(gone.wait(), loop).result(60)
                client._router._credentials._renew_at_s = 0.0  # type: ignore[attr-defined]  # due, and nobody answers
                for _ in range(5):
                    assert all(isinstance(result, Hit) for result in client.get_many(keys))

    async with control_with_tenants(postgres, tmp_path) as control:
        endpoint = str(control.plane.endpoint)
        secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
        node_key = await control.add_api_key(credentials_pb2.ROLE_NODE)
        work = asyncio.create_task(asyncio.to_thread(use, endpoint, secret, node_key))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if work.done():
            work.result()
    gone.set()
    await work
