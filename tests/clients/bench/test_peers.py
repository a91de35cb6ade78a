from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from saltern.bench.peers.catalogue import PEERS, choose_peers
from saltern.bench.peers.drivers.measure import Measure
from saltern.bench.peers.drivers.store import Batch, Get, Put, Store
from saltern.bench.peers.process import PeerError, PeerProcess
from saltern.errors import InvalidArgumentError

MIB = 1024 * 1024


class DictStore(Store):
    """The smallest store that there is: a dict in this process."""

    def start(self) -> None:
        self.values: dict[str, bytes] = {}
        self.version = "dict"
        self.spoiled = False

    def put_ways(self) -> Mapping[str, Put]:
        return {"each": self._put}

    def get_ways(self) -> Mapping[str, Get]:
        return {"each": self._get}

    def exists(self, keys: Sequence[str]) -> int:
        return sum(key in self.values for key in keys)

    def exists_one(self, key: str) -> bool:
        return key in self.values

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.values.pop(key, None)

    def _put(self, batch: Batch) -> None:
        self.values.update((key, bytes(view)) for key, view in zip(batch.keys, batch.views, strict=True))

    def _get(self, batch: Batch) -> Sequence[bytes | memoryview]:
        return batch.views if self.spoiled else [self.values[key] for key in batch.keys]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DictStore]:
    store = DictStore(tmp_path)
    store.start()
    yield store
    store.close()


def test_every_peer_is_chosen_or_named_with_a_reason(tmp_path: Path) -> None:
    chosen, left_out = choose_peers(None, tmp_path)
    assert chosen == []
    assert set(left_out) == set(PEERS)
    assert all("not installed" in reason for reason in left_out.values())


def test_peers_are_left_out_by_choice(tmp_path: Path) -> None:
    chosen, left_out = choose_peers("none", tmp_path)
    assert (chosen, set(left_out.values())) == ([], {"not asked for"})


def test_an_unknown_peer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        choose_peers("redis,sqlite", tmp_path)
    assert refused.value.reason == "UNKNOWN_PEER"


def test_a_peer_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The driver runs with our own interpreter, which has no client of LMCache's."""
    (tmp_path / "lmcache" / "bin").mkdir(parents=True)
    (tmp_path / "lmcache" / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(PeerError, match="lmcache_server"):
        PeerProcess(PEERS["lmcache"], tmp_path, tmp_path / "log", MIB)


def test_figures_of_a_store(store: DictStore) -> None:
    measure = Measure(store, 4 * MIB)
    assert measure.prepare(MIB) == {"put": "each", "get": "each"}
    assert set(measure.put(MIB)) == set(measure.get(MIB)) == {"seconds", "client_cpu_s", "server_cpu_s"}
    assert measure.exists(10, 3, True)["keys_per_s"] > 0
    assert measure.exists(10, 3, False)["keys_per_s"] > 0
    assert measure.exists_one(3)["seconds"] > 0
    assert set(measure.batch(5000, 4096)) == {"put_seconds", "exists_seconds", "get_seconds"}


def test_a_get_that_moves_nothing_does_not_pass(store: DictStore) -> None:
    store.spoiled = True
    with pytest.raises(RuntimeError, match="other bytes"):
        Measure(store, 4 * MIB).prepare(MIB)


def test_a_batch_is_cut_without_losing_a_block() -> None:
    views = [memoryview(bytes([index])) for index in range(5)]
    batch = Batch([str(index) for index in range(5)], views, list(range(5)))
    assert [part.keys for part in batch.split(2)] == [["0", "1"], ["2", "3"], ["4"]]


def test_a_private_network_has_loopback_and_nothing_else() -> None:
    code = """
import socket
from saltern.bench import network
from saltern.errors import FailedPreconditionError
try:
    network.enter_private_network()
except FailedPreconditionError as error:
    print(error.reason)
else:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        print([name for _, name in socket.if_nameindex() if name not in ("sit0", "tunl0")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("['lo']", "NO_PRIVATE_NETWORK")
