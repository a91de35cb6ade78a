"""What a client asks to be narrowed to reaches the exchange, and decides whose blocks it finds."""

from __future__ import annotations

import asyncio
from pathlib import Path

from saltern.admin.v1 import credentials_pb2
from saltern.async_client import AsyncClient
from saltern.client import Client
from saltern.keys import BlockHash, BlockKey
from tests.conftest import SessionPostgres
from tests.support.clients import DEADLINE_MS
from tests.support.control import control_plane, migrate

HASHES = [BlockHash(bytes([number]) * 32) for number in range(3)]


async def test_i2_clients_of_other_projects_users_and_sessions_name_blocks_differently(
    postgres: SessionPostgres, tmp_path: Path
) -> None:
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path) as control:
            await control.redeem()
            await control.add_tenant("acme", "chat", limit_bytes=16 << 20)
            secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
            endpoint = str(control.plane.endpoint)

            def keys(**narrowed: str) -> tuple[BlockKey, ...]:
                with Client(
                    control=endpoint, api_key=secret, namespace="chat", deadline_ms=DEADLINE_MS, **narrowed
                ) as client:
                    return tuple(client.block_keys(HASHES))

            def all_keys() -> list[tuple[BlockKey, ...]]:
                return [
                    keys(),
                    keys(project="p"),
                    keys(project="q"),
                    keys(user="p"),
                    keys(session="p"),
                    keys(project="p", user="p"),
                    keys(project="p", user="p", session="p"),
                ]

            first, second = await asyncio.to_thread(all_keys), await asyncio.to_thread(all_keys)
            assert first == second
            assert len(set(first)) == len(first)
            async with await AsyncClient.connect(
                control=endpoint, api_key=secret, namespace="chat", deadline_ms=DEADLINE_MS, project="q"
            ) as client:
                assert tuple(client.block_keys(HASHES)) == first[2]
