"""The process that holds Mooncake's client: ``python -I -m dataplane.io.engines.mooncake_child``.

Mooncake's client opens ports on every interface, lends registered memory to whoever reaches them, may wait for seconds
or minutes inside a call, and is a million lines of C++ that nobody here has read. So it has a process of its own, which
is given names and sealed bytes, and nothing else: no key, no token, no plain byte, and none of the node's memory but
the piece that is shared for this (I3, I7).

It is told where everything is by a line of JSON on its standard input, and lives as long as that stays open. Each
channel is a socket with one request at a time, 4 bytes of length and then JSON: ``["put", [[name, offset, bytes],
...]]``, ``["get", ...]``, ``["remove", [name, ...]]`` or ``["remove-matching", [pattern]]``; the answer is a list of
Mooncake's own codes. The first answer of all, on the first channel and unasked, is what its setup returned.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import struct
import sys
import threading
from typing import Any

_LENGTH = struct.Struct("<I")


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    channels = [socket.socket(fileno=descriptor) for descriptor in setup["channels"]]
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError:
        _send(channels[0], [None])
        return
    store = MooncakeDistributedStore()
    host = _own_address(setup["master_host"], setup["master_port"])
    master = f"{setup['master_host']}:{setup['master_port']}"
    code = store.setup(host, setup["metadata"], 0, setup["buffer_bytes"], setup["protocol"], setup["device"], master)
    memory = mmap.mmap(setup["memory"], setup["memory_bytes"])
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if code == 0:
        code = store.register_buffer(address, len(memory))
    _send(channels[0], [code])
    if code == 0:
        for channel in channels:
            threading.Thread(target=_serve, args=(channel, store, address), daemon=True).start()
        sys.stdin.read()
    # The node is gone or has had enough: what Mooncake's threads still do must not hold the process.
    os._exit(0)


def _own_address(host: str, port: int) -> str:
    """The address of this host that a packet to the master would have; none is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
        return own


def _serve(channel: socket.socket, store: Any, address: int) -> None:
    while True:
        operation, items = _receive(channel)
        if operation == "put":
            names, starts, sizes = zip(*items, strict=True)
            codes = store.batch_put_from(list(names), [address + start for start in starts], list(sizes))
        elif operation == "get":
            names, starts, sizes = zip(*items, strict=True)
            codes = store.batch_get_into(list(names), [address + start for start in starts], list(sizes))
        elif operation == "remove":
            codes = store.batch_remove(items, True)  # also what somebody has read lately
        else:
            codes = [store.remove_by_regex(items[0], True)]
        _send(channel, list(codes))


def _send(channel: socket.socket, answer: list[Any]) -> None:
    content = json.dumps(answer).encode()
    channel.sendall(_LENGTH.pack(len(content)) + content)


def _receive(channel: socket.socket) -> Any:
    [length] = _LENGTH.unpack(_read(channel, _LENGTH.size))
    return json.loads(_read(channel, length))


def _read(channel: socket.socket, length: int) -> bytes:
    content = bytearray()
    while len(content) < length:
        part = channel.recv(length - len(content))
        if not part:
            os._exit(0)
        content += part
    return bytes(content)


if __name__ == "__main__":
    main()
