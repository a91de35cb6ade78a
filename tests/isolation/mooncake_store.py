"""Mooncake Store's multi-tenant master behind the suite's interface, for a table side by side.

It needs the wheel ``mooncake-transfer-engine-non-cuda`` (0.3.13) and runs in a network namespace of its own, since its
data port binds every interface::

    GLOG_minloglevel=3 unshare --net python -m tests.isolation --store mooncake --output json

Every setting is the program's own default, but for the addresses and the quotas.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import importlib.util
import itertools
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.isolation.adapter import (
    MIB,
    Attempt,
    Deployment,
    FrozenStore,
    NotOfferedError,
    Over,
    Put,
    Quota,
    Store,
    StoreAdapter,
    TenantClient,
)
from tests.isolation.blocks import key_of

_PORTS = itertools.count(50151, 2)
_LOCAL_BUFFER_BYTES = 64 * MIB
_ANSWER_S = 15.0
_CONVERGE_S = 3.0
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_SEGMENT = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 16 << 20, "tcp", "", sys.argv[2]), flush=True)
sys.stdin.read()
store.close()
"""
_ONE_SIDED = """
import ctypes, sys
from mooncake.engine import TransferEngine
endpoint, address, data = sys.argv[1], int(sys.argv[2]), sys.stdin.buffer.read()
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
buffer = ctypes.create_string_buffer(data, len(data))
engine.register_memory(ctypes.addressof(buffer), len(data))
engine.get_first_buffer_address(endpoint)
print(engine.transfer_sync_write(endpoint, ctypes.addressof(buffer), address, len(data)))
"""


class MooncakeAdapter(StoreAdapter):
    """A master, a storage process and clients in this process, fresh for each case."""

    def __init__(self) -> None:
        if importlib.util.find_spec("mooncake") is None:
            raise NotOfferedError("mooncake-transfer-engine-non-cuda is not installed here")
        _require_private_network()
        os.environ.setdefault("GLOG_minloglevel", "2")
        self.name = "Mooncake Store, multi-tenant master"

    @contextmanager
    def store(self, tenants: Mapping[str, Quota], *, capacity_bytes: int) -> Iterator[Store]:
        if any(quota.ssd_limit_bytes for quota in tenants.values()):
            raise NotOfferedError("it is run without its SSD tier here")
        with _running(tenants, capacity_bytes) as running:
            yield running

    @contextmanager
    def frozen_store(self) -> Iterator[FrozenStore]:
        with _running({"a": Quota(16 * MIB)}, 64 * MIB) as running:
            yield FrozenMooncake(running)

    @contextmanager
    def deployment(self, tenants: Mapping[str, Quota], *, capacity_bytes: int) -> Iterator[Deployment]:
        with _running(tenants, capacity_bytes) as running:
            yield MooncakeDeployment(running)

    def close(self) -> None:
        """Nothing is shared."""


def _require_private_network() -> None:
    """Refuse to run where the data port could be reached, and bring loopback up where it is the only interface."""
    names = [name for _, name in socket.if_nameindex()]
    if names != ["lo"]:
        raise NotOfferedError("start it in a network namespace of its own: its data port binds every interface")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        flags = struct.unpack("16sH14x", request)[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


class MooncakeClient(TenantClient):
    def __init__(self, store: Any) -> None:
        self.store = store

    def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[Put]:
        joined = b"".join(value for _, value in items)
        with _registered(self.store, bytearray(joined)) as address:
            starts = itertools.accumulate((len(value) for _, value in items), initial=address)
            keys, sizes = [key.hex() for key, _ in items], [len(value) for _, value in items]
            codes = self.store.batch_put_from(keys, list(starts)[:-1], sizes)
        return [Put.STORED if code == 0 else Put.REFUSED for code in codes]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if len(keys) > 64:
            return [bytes(value) or None for value in self.store.get_batch([key.hex() for key in keys])]
        return [self.store.get(key.hex()) or None for key in keys]

    def get_into(self, key: bytes, buffer: bytearray) -> int | None:
        with _registered(self.store, buffer) as address:
            length = int(self.store.get_into(key.hex(), address, len(buffer)))
        return length if length >= 0 else None

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [found == 1 for found in self.store.batch_is_exist([key.hex() for key in keys])]

    def delete(self, keys: Sequence[bytes]) -> int:
        return sum(code == 0 for code in self.store.batch_remove([key.hex() for key in keys], True))


@contextmanager
def _registered(store: Any, buffer: bytearray) -> Iterator[int]:
    view = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    address = ctypes.addressof(view)
    store.register_buffer(address, len(buffer))
    try:
        yield address
    finally:
        store.unregister_buffer(address)


class MooncakeStore(Store):
    """A running master with one storage process."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self.folder = folder
        self.rpc_port = next(_PORTS)
        self.http_port = self.rpc_port + 1
        self._clients: dict[str, MooncakeClient] = {}
        self.master = self.start_master()
        self.segment = subprocess.Popen(
            [sys.executable, "-c", _SEGMENT, str(capacity_bytes), f"127.0.0.1:{self.rpc_port}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.segment.stdout is not None
        answer = self.segment.stdout.readline().strip()
        assert answer == "0", f"the storage process answered {answer}"

    def start_master(self) -> subprocess.Popen[bytes]:
        program = shutil.which("mooncake_master", path=str(Path(sys.executable).parent)) or "mooncake_master"
        with (self.folder / "master.log").open("ab") as log:
            master = subprocess.Popen(
                [
                    *(program, f"--rpc_port={self.rpc_port}", "--rpc_address=127.0.0.1", "--logtostderr=1"),
                    *(f"--metrics_port={self.http_port}", "--metrics_host=127.0.0.1"),
                    *("--enable_metric_reporting=false", "--enable_multi_tenants=true"),
                    *("--tenant_quota_connector_type=file", f"--tenant_quota_connector_uri={self.folder}/quotas.yaml"),
                ],
                stdout=log,
                stderr=log,
            )
        for port in (self.rpc_port, self.http_port):
            _wait_for(port, master)
        return master

    def new_client(self, tenant: str) -> MooncakeClient:
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

        store = MooncakeDistributedStore()
        address = f"127.0.0.1:{self.rpc_port}"
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, _LOCAL_BUFFER_BYTES, "tcp", "", address, tenant_id=tenant)
        if code:
            raise NotOfferedError(f"setup for tenant {tenant!r} answered {code}")
        return MooncakeClient(store)

    def client(self, tenant: str, namespace: str = "chat") -> TenantClient:
        if namespace != "chat":
            raise NotOfferedError("there are no namespaces")
        if tenant not in self._clients:
            self._clients[tenant] = self.new_client(tenant)
        return self._clients[tenant]

    def http(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        """Call the administrative interface, which asks for no credential: (status, answer)."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.http_port}{path}", method=method, data=data)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def used_bytes(self, tenant: str) -> int:
        rows = json.loads(self.http("GET", "/api/v1/tenant_quotas")[1])["data"]
        return next((int(row["charged_bytes"]) for row in rows if row["tenant_id"] == tenant), 0)

    def request_limit(self, tenant: str, limit_bytes: int) -> int:
        body = {"requested_quota_bytes": limit_bytes}
        return self.http("PUT", f"/api/v1/tenant_quotas?tenant_id={tenant}", body)[0]

    def set_limit(self, tenant: str, limit_bytes: int) -> None:
        self.request_limit(tenant, limit_bytes)
        end_s = time.monotonic() + _CONVERGE_S
        while self.used_bytes(tenant) > limit_bytes and time.monotonic() < end_s:
            time.sleep(0.1)

    def remove_all(self, tenant: str) -> None:
        client = self.client(tenant)
        assert isinstance(client, MooncakeClient)
        client.store.remove_all(True)

    def impersonate(self, victim: str, by: str, key: bytes, forged: bytes) -> list[Attempt]:
        stranger = self.new_client(victim)
        [value] = stranger.get([key])
        stranger.delete([key])
        stranger.put([(key, forged)])
        return [Attempt(f"says tenant_id={victim}", opened=True, value=value)]

    def overwrite(self, victim: str, by: str, key: bytes, forged: bytes) -> list[str]:
        attacker = self.client(by)
        attacker.put([(key, forged)])
        attacker.delete([key])
        return ["the same key", "a delete of it", f"a one-sided write: {self._write_one_sided(victim, key, forged)}"]

    def swap_bytes(self, tenant: str, key: bytes, other_tenant: str, other_key: bytes) -> None:
        [value] = self.client(other_tenant).get([other_key])
        assert value is not None
        self._write_one_sided(tenant, key, value)

    def _write_one_sided(self, tenant: str, key: bytes, data: bytes) -> str:
        client = self.client(tenant)
        assert isinstance(client, MooncakeClient)
        [replica, *_] = client.store.get_replica_desc(key.hex())
        place = replica.get_memory_descriptor().buffer_descriptor
        command = [sys.executable, "-c", _ONE_SIDED, place.transport_endpoint, str(place.buffer_address)]
        return subprocess.run(command, input=data, capture_output=True, timeout=60, check=False).stdout.decode().strip()

    def ssd_used_bytes(self, tenant: str) -> int:
        raise NotOfferedError("SSD bytes are charged to nobody")

    def slow_get(self, tenant: str, key: bytes, meanwhile: Callable[[], None], *, over: Over) -> bytes | None:
        raise NotOfferedError("its client reads an entry in one call")

    def half_put(self, tenant: str, key: bytes, value: bytes, *, over: Over) -> AbstractContextManager[None]:
        raise NotOfferedError("its client writes an entry in one call")

    def close(self) -> None:
        for client in self._clients.values():
            client.store.close()
        for process in (self.segment, self.master):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(30)
        assert self.segment.stdin is not None and self.segment.stdout is not None
        self.segment.stdin.close()
        self.segment.stdout.close()


@contextmanager
def _running(tenants: Mapping[str, Quota], capacity_bytes: int) -> Iterator[MooncakeStore]:
    if any(quota.reserved_bytes for quota in tenants.values()):
        raise NotOfferedError("there are no reservations")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-")))
        names = [name for name in tenants if name.isprintable()]
        rows = (f"  - name: {name}\n    quota: {tenants[name].limit_bytes // MIB}MB\n" for name in names)
        (folder / "quotas.yaml").write_text("version: 1\ntenants:\n" + "".join(rows))
        running = MooncakeStore(folder, capacity_bytes)
        stack.callback(running.close)
        for name in names:
            running.request_limit(name, tenants[name].limit_bytes)
        yield running


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise NotOfferedError("the master did not start")


class FrozenMooncake(FrozenStore):
    def __init__(self, running: MooncakeStore) -> None:
        self._running = running
        self._client = running.client("a")
        self._client.put([(key_of(1), b"value")])

    def freeze(self) -> None:
        for process in (self._running.master, self._running.segment):
            process.send_signal(signal.SIGSTOP)

    def call_beside_a_ticking_loop(self) -> tuple[str, int]:
        return asyncio.run(self._call())

    async def _call(self) -> tuple[str, int]:
        reading = asyncio.ensure_future(asyncio.to_thread(self._client.get, [key_of(1)]))
        began_s, ticks = time.monotonic(), 0
        while not reading.done() and time.monotonic() - began_s < _ANSWER_S:
            await asyncio.wait({reading}, timeout=0.02)
            ticks += 1
        answered = reading.done()
        for process in (self._running.segment, self._running.master):
            process.send_signal(signal.SIGCONT)
        [value] = await reading
        took_s = time.monotonic() - began_s
        if not answered:
            return f"no answer until it was thawed after {_ANSWER_S:g} s", ticks
        return f"{'miss' if value is None else 'hit'} after {took_s:.1f} s", ticks


class MooncakeDeployment(Deployment):
    def __init__(self, running: MooncakeStore) -> None:
        self._running = running

    def client(self, tenant: str) -> TenantClient:
        return self._running.client(tenant)

    def restart_management(self, while_down: Callable[[], None]) -> None:
        self._running.master.kill()
        self._running.master.wait(30)
        while_down()
        self._running.master = self._running.start_master()
        time.sleep(_ANSWER_S)  # its processes notice by their own heartbeats

    def administer_without_right(self, by: str, victim: str) -> dict[str, str]:
        raised = self._running.request_limit(by, 48 * MIB)
        wiped, _ = self._running.http("POST", "/api/v1/remove_all?force=true")
        return {
            "raise own quota, no credential": "" if raised == 200 else str(raised),
            "wipe everything, no credential": "" if wiped == 200 else str(wiped),
        }
