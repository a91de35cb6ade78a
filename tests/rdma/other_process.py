"""A client in a process of its own.

``sizes`` stores an entry of every size and reads it back, ``endless`` puts and gets until it is killed.
"""

from __future__ import annotations

import multiprocessing
import random
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

from saltern.client import Client
from saltern.credentials import NodeEndpoint
from saltern.keys import BlockKey
from saltern.results import GetResult, Hit, Stored
from tests.rdma.extent import by_extent
from tests.support.clients import static_client
from tests.support.static_node import StaticNode

MIB = 1024 * 1024
ANSWER_S = 150
SIZES = by_extent(
    quick=[1, 63, 4096, 4097, 65_537, MIB - 1, 8 * MIB + 1],
    usual=[1, 2, 63, 64, 65, 4095, 4096, 4097, 65_537, MIB - 1, MIB, 8 * MIB + 1, 64 * MIB],
    full=[1, 2, 63, 64, 65, 4095, 4096, 4097, 65_537, MIB - 1, MIB, 8 * MIB, 8 * MIB + 1, 64 * MIB],
)


#: Prime to the size of a page, so that the pages of 256 MiB each begin elsewhere in it.
_PERIOD_BYTES = 65_537


def pattern(number: int, size_bytes: int) -> bytes:
    """Bytes in which no two pages and no two entries are alike; quickly, for an emulated processor."""
    period = random.Random(number).randbytes(min(size_bytes, _PERIOD_BYTES))
    return (period * (size_bytes // _PERIOD_BYTES + 1))[:size_bytes]


def store_and_read(client: Client, number: int, sizes: list[int], *, registered: bool) -> None:
    """Put entries of ``sizes`` in one call, get them back in another, compare every byte."""
    keys = [BlockKey((number * 10_000 + at).to_bytes(32, "little")) for at in range(len(sizes))]
    values = [pattern(number * 10_000 + at, size) for at, size in enumerate(sizes)]
    stored = client.put_many(list(zip(keys, values, strict=True)))
    assert stored == [Stored()] * len(sizes), [result for result in stored if result != Stored()][:3]
    if registered:
        with client.allocate(sum(sizes)) as buffer:
            starts = [sum(sizes[:at]) for at in range(len(sizes))]
            views = [buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)]
            _check(client.get_into(keys, views), values)
    else:
        _check(client.get_many(keys), values)
    client.delete(keys)


def _check(results: Sequence[GetResult], values: Sequence[bytes]) -> None:
    for result, value in zip(results, values, strict=True):
        assert isinstance(result, Hit), result
        assert result.payload == value, f"{len(value)} bytes differ"


class OtherProcess:
    """A client in a process of its own, forked before this one has a node, a thread or a device.

    A fresh interpreter would need most of a minute to load under emulation.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, what: str, node: StaticNode, tenant: str = "acme") -> None:
        """Let it do ``what``, one of the functions below, with a client of ``node``."""
        self.pipe.send((what, node.wire_endpoint, node.token(tenant, "chat")))

    def answer(self, limit_s: float = ANSWER_S) -> str:
        """What it says next: its transport, or a traceback."""
        assert self.pipe.poll(limit_s), "the other process does not answer"
        return str(self.pipe.recv())

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


def _serve(pipe: Connection) -> None:
    what, endpoint, token = pipe.recv()
    try:
        with static_client(
            NodeEndpoint("node-1", endpoint, ""), token, transport="rdma", deadline_ms=120_000
        ) as client:
            if what == "sizes":
                for number, size in enumerate(SIZES):
                    store_and_read(client, number, [size], registered=size < MIB)
            while what == "endless":
                store_and_read(client, 9_999, [MIB] * 8, registered=False)  # keys that no other test stores
                pipe.send(client.transport)
            pipe.send(client.transport)
    except BaseException:
        pipe.send(traceback.format_exc())
