"""A stranger who listens at a node's shared-memory path on the client's host: no token for them."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from saltern.credentials import NodeEndpoint
from saltern.results import Stored
from saltern.transport.impostor import trusted_uids
from tests.support.clients import block, static_client
from tests.support.static_node import static_node

_STRANGER_UID = 65534
_SYS_SETRESUID = 117
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can listen as another user")


@contextmanager
def listening_as_stranger(path: Path) -> Iterator[socket.socket]:
    """A socket whose listener the kernel knows as another user: the credentials of the one thread that listens."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    outcome: list[int] = []

    def listen() -> None:
        listener.bind(str(path))
        outcome.append(ctypes.CDLL(None).syscall(_SYS_SETRESUID, -1, _STRANGER_UID, -1))  # this thread alone
        listener.listen()

    with listener:
        thread = threading.Thread(target=listen)
        thread.start()
        thread.join()
        assert outcome == [0]
        yield listener


@needs_root
def test_i1_no_token_goes_to_a_strangers_socket(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with static_node() as node, listening_as_stranger(path) as listener:
        endpoint = NodeEndpoint("node-1", node.wire_endpoint, str(path))
        with static_client(endpoint, node.token("acme", "chat")) as client:
            assert client.put_many([block(1, 4096)]) == [Stored()]  # over tcp
        with static_client(endpoint, node.token("acme", "chat"), transport="shm") as client:
            (refused,) = client.put_many([block(2, 4096)])
            assert refused.error.reason == "UNTRUSTED_SOCKET"
        listener.settimeout(5)
        for _ in range(2):
            with listener.accept()[0] as heard:
                heard.settimeout(5)
                assert heard.recv(4096) == b"", "the client said something to the stranger"


@needs_root
def test_i1_only_root_can_make_a_folders_owner_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "saltern"
    folder.mkdir()
    os.chown(folder, _STRANGER_UID, _STRANGER_UID)
    # Below /tmp, where everybody can write, anybody could have made it.
    assert trusted_uids(str(folder / "node.sock")) == {0}
    assert trusted_uids("relative/node.sock") == trusted_uids("/does-not-exist/node.sock") == {0}


@needs_root
def test_i1_a_folder_that_root_gave_away_makes_its_owner_trusted(tmp_path: Path) -> None:
    # In /proc, where only the kernel puts folders, that of a process is its user's.
    with subprocess.Popen(["sleep", "60"], user=_STRANGER_UID) as stranger:
        try:
            folder = Path("/proc", str(stranger.pid))
            assert trusted_uids(str(folder / "node.sock")) == {0, _STRANGER_UID}
            link = tmp_path / "link"
            link.symlink_to(folder)
            assert trusted_uids(str(link / "node.sock")) == {0}
        finally:
            stranger.kill()
