"""Rotation as tenants feel it: a real control plane, Postgres and node with an SSD tier, and traffic meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from controlplane.clock import utc_now
from controlplane.db import connect as connect_database
from controlplane.salts.keeper import SaltKeeper
from saltern.admin.v1 import credentials_pb2, quotas_pb2
from saltern.errors import SalternError
from saltern.keys import BlockHash, BlockKeyDeriver, SaltKey
from tests.support.control import Control, text_of
from tests.support.live_files import live_sizes
from tests.support.served_node import connect, serve_node
from tests.support.wire_client import WireClient, block

MIB = 1024 * 1024
SIZE = 60_000
ENTRIES = 120
DEADLINE_S = 40
HASHES = [BlockHash(n.to_bytes(32, "big")) for n in range(ENTRIES)]
VALUES = [block(n, SIZE + n) for n in range(ENTRIES)]


def named(salt: bytes) -> dict[bytes, bytes]:
    """The same blocks as a client with this salt names them."""
    names = BlockKeyDeriver(SaltKey(salt), b"model of chat").derive_many(HASHES)
    return dict(zip(names, VALUES, strict=True))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


async def set_quotas(control: Control) -> None:
    """Room for a third of the entries in DRAM, for all of them on SSD."""
    tiers = [
        quotas_pb2.TierQuota(tier=quotas_pb2.TIER_DRAM, limit_bytes=2 * MIB),
        quotas_pb2.TierQuota(tier=quotas_pb2.TIER_SSD, limit_bytes=48 * MIB),
    ]
    request = quotas_pb2.UpdateQuotaRequest(quota=quotas_pb2.Quota(name="tenants/acme/quota", tiers=tiers))
    await control.quotas.UpdateQuota(request, metadata=await control.bearer(control.admin_key))


def refusal(act: Callable[[], object]) -> str:
    """The reason why the node refuses ``act``; empty if it does not."""
    try:
        act()
    except SalternError as error:
        return error.reason
    return ""


def put_refusal(client: WireClient, name: bytes, value: bytes) -> str:
    """The reason why the node refuses one entry; empty if it takes it."""
    reply = client.put({name: value})
    return "".join(failed.error.reason for failed in reply.errors)


def put_all(client: WireClient, entries: dict[bytes, bytes]) -> None:
    for name, value in entries.items():
        client.put({name: value})


def found(client: WireClient, entries: dict[bytes, bytes]) -> int:
    """How many are there, each byte for byte."""
    got = {name: value for key in entries for name, value in client.get(key).items()}
    assert all(entries[name] == value for name, value in got.items())
    return len(got)


def on_disk(folder: Path) -> int:
    return sum(live_sizes(folder, ".seg").values())


class Traffic:
    """A client that goes on writing new entries under one epoch until it is refused; why, and how often it was not."""

    def __init__(self, endpoint: str, token: str, epoch: int) -> None:
        self.served, self.reason = 0, ""
        self._client = connect(endpoint)
        self._client.hello(token, epoch=epoch)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self.reason:
            self.reason = put_refusal(self._client, os.urandom(32), b"written under traffic")
            self.served += not self.reason

    def end(self) -> None:
        self._thread.join(DEADLINE_S)
        self._client.sock.close()


async def test_i12_rotation_under_traffic_moves_writes_keeps_reads_and_then_leaves_nothing(
    control: Control, tmp_path: Path
) -> None:
    await control.add_tenant("acme", "chat")
    await set_quotas(control)
    writer = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
    node_secret = await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node")
    ssd_dir = tmp_path / "ssd"
    arguments = ["--ssd-dir", str(ssd_dir), "--ssd-bytes", "64MiB"]
    with serve_node(tmp_path / "node", str(control.plane.endpoint), node_secret, *arguments) as node:
        endpoint = (await node.ready())["wire_endpoint"]
        first = await control.exchange(writer, "chat")
        (old_salt,) = first.salt_keys
        old_entries = named(old_salt.key)
        with connect(endpoint) as old, connect(endpoint) as new:
            await until(lambda: not refusal(lambda: old.hello(first.access_token, epoch=1)))
            await until(lambda: not refusal(lambda: put_all(old, old_entries)) and on_disk(ssd_dir) > 80 * SIZE)
            before = await asyncio.to_thread(found, old, old_entries)
            assert before > 80
            key_files = set(ssd_dir.rglob("key"))
            assert len(key_files) == 1
            traffic = Traffic(endpoint, first.access_token, 1)
            await until(lambda: traffic.served > 20)

            await control.rotate_salt("acme", grace_s=3600)

            await asyncio.to_thread(traffic.end)
            assert traffic.reason == "EPOCH_NOT_AVAILABLE", "a session of the old epoch writes no more"
            second = await control.exchange(writer, "chat")
            assert [salt.epoch for salt in second.salt_keys] == [1, 2]
            assert second.salt_keys[0] == old_salt
            new_entries = named(second.salt_keys[-1].key)
            assert not new_entries.keys() & old_entries.keys()
            await until(lambda: not refusal(lambda: new.hello(second.access_token, epoch=2)))
            new_name, new_value = next(iter(new_entries.items()))
            new.put({new_name: new_value})
            assert new.get(new_name) == {new_name: new_value}
            assert found(new, old_entries) == 0, "an old name means nothing in the new epoch"
            # Within the grace the old epoch is read on, by sessions that were open and by new ones.
            assert await asyncio.to_thread(found, old, old_entries) > 80
            with connect(endpoint) as late:
                late.hello(second.access_token, epoch=1)
                assert await asyncio.to_thread(found, late, old_entries) > 80

            # Another control plane whose clock says that the grace is over.
            assert await step_at(control, utc_now() + timedelta(hours=1)) == 1

            await until(lambda: refusal(lambda: old.get(next(iter(old_entries)))) == "EPOCH_NOT_AVAILABLE")
            with connect(endpoint) as late:
                assert refusal(lambda: late.hello(second.access_token, epoch=1)) == "EPOCH_NOT_AVAILABLE"
            await until(lambda: not any(path.exists() for path in key_files))
            await until(lambda: on_disk(ssd_dir) < 10 * SIZE)
            assert new.get(new_name) == {new_name: new_value}, "the new epoch is untouched"
            assert [salt.epoch for salt in (await control.exchange(writer, "chat")).salt_keys] == [2]
            node.process.terminate()
            await node.end()


async def step_at(control: Control, now: datetime) -> int:
    database = connect_database(text_of(control.database.engine.url), pool_connections=2)
    try:
        return await SaltKeeper(database, control.key_encryption_key, lambda: now).step()
    finally:
        await database.close()
