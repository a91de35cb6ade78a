"""The TLS socket against a plain SSLSocket: what is offered again after a full socket arrives once and whole."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path

from saltern.tls import client_context, server_context
from saltern.tls_socket import wrap
from tests.support.certificates import Authority


def test_bytes_offered_again_in_other_pieces_arrive_once_and_whole(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ours, theirs = socket.socketpair()
    data = random.Random(0).randbytes(3_000_000)
    received = bytearray()
    is_full = threading.Event()

    def read() -> None:
        with client_context(authority.client()).wrap_socket(theirs, server_hostname="localhost") as peer:
            peer.settimeout(20)
            is_full.wait(20)
            while piece := peer.recv(65536):
                received.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    sock = wrap(server_context(authority.server().read()), ours, server_side=True)
    with sock:
        sock.settimeout(20)
        sock.do_handshake()
        sock.setblocking(False)
        sent, refusals, randomly = 0, 0, random.Random(1)
        least = 0
        while sent < len(data):
            offered = data[sent : sent + max(least, randomly.randrange(1, 60_000))]
            cut = randomly.randrange(len(offered) + 1)
            try:
                count = sock.sendmsg([offered[:cut], memoryview(offered)[cut:]])
                sent += count
                least = len(offered) - count  # a record of the rest may be on its way
            except BlockingIOError:
                refusals += 1
                is_full.set()
                least = len(offered)  # the same and more
                threading.Event().wait(0.001)
        assert refusals
        sock.say_goodbye()
    reader.join(20)
    assert bytes(received) == data
