"""Bytes through the seam, both bindings: exact, split by the device's limits, one completion for each chain."""

from __future__ import annotations

import asyncio
import itertools
import os
from contextlib import closing

import pytest

from saltern.errors import ResourceExhaustedError
from saltern.rdma import BINDING_NAMES, Access, Read, Write
from tests.rdma.sides import Side, connected

MIB = 1 << 20


@pytest.mark.parametrize("size_bytes", [1, 4095, 4097, MIB + 1, 9 * MIB + 3])
def test_read_and_write_are_exact_and_touch_nothing_else(binding: str, size_bytes: int) -> None:
    with connected(binding, binding, size_bytes=size_bytes + 8192) as (node, client):
        content = os.urandom(size_bytes)
        client.memory[100 : 100 + size_bytes] = content
        (ended,) = node.run(Read((node.region.local(7, size_bytes),), client.region.remote(100, size_bytes)))
        assert ended.ok
        assert node.memory[7 : 7 + size_bytes] == content
        assert node.memory[:7] == bytes(7)
        assert node.memory[7 + size_bytes :] == bytes(8185)

        client.memory[:] = bytes(len(client.memory))
        (ended,) = node.run(Write((node.region.local(7, size_bytes),), client.region.remote(50, size_bytes)))
        assert ended.ok
        assert client.memory[50 : 50 + size_bytes] == content
        assert client.memory[:50] == bytes(50)
        assert client.memory[50 + size_bytes :] == bytes(8142)


def test_a_thousand_blocks_are_chains_with_one_completion_each(binding: str) -> None:
    blocks, block_bytes = 1000, 512
    with connected(binding, binding, send_requests=128) as (node, client):
        content = os.urandom(blocks * block_bytes)
        client.memory[: len(content)] = content
        # Each block goes to where the one before it does not end, so that nothing could have been joined.
        places = [(number * 7) % blocks * block_bytes for number in range(blocks)]
        ended = node.run(
            *(
                Read((node.region.local(place, block_bytes),), client.region.remote(number * block_bytes, block_bytes))
                for number, place in enumerate(places)
            )
        )
        assert [each.token for each in ended] == list(range(8))
        assert all(each.ok for each in ended)
        assert node.pair.free_requests == 128
        for number, place in enumerate(places):
            block = content[number * block_bytes : (number + 1) * block_bytes]
            assert node.memory[place : place + block_bytes] == block


def test_spans_are_gathered_and_scattered_in_order(binding: str) -> None:
    with connected(binding, binding) as (node, client):
        client.memory[:90] = bytes(range(90))
        # More spans than one request takes: 40 of 2 bytes, backwards.
        spans = tuple(node.region.local(1000 - 10 * number, 2) for number in range(40))
        (ended,) = node.run(Read(spans, client.region.remote(0, 80)))
        assert ended.ok
        for number in range(40):
            at = 1000 - 10 * number
            assert node.memory[at : at + 2] == bytes((2 * number, 2 * number + 1))
        (ended,) = node.run(Write(spans, client.region.remote(500, 80)))
        assert ended.ok
        assert client.memory[500:580] == bytes(range(80))


@pytest.mark.parametrize(("node_binding", "client_binding"), list(itertools.product(BINDING_NAMES, repeat=2)))
def test_an_immediate_tells_that_the_bytes_are_there(node_binding: str, client_binding: str) -> None:
    with connected(node_binding, client_binding) as (node, client):
        client.pair.post_receives(["first", "second"])
        node.memory[:4] = b"data"
        told = Write((node.region.local(0, 4),), client.region.remote(0, 4), immediate=0x01020304)
        (sent,) = node.run(told)
        assert sent.ok
        (ended,) = client.collect(1)
        assert client.memory[:4] == b"data"
        assert (ended.token, ended.is_receive, ended.immediate, ended.byte_count) == ("first", True, 0x01020304, 4)

        # No bytes, only the word: what ends a batch whose last block has been told of before.
        node.run(Write((), client.region.remote(0, 0), immediate=0xFFFFFFFF))
        (ended,) = client.collect(1)
        assert (ended.token, ended.immediate, ended.byte_count) == ("second", 0xFFFFFFFF, 0)
        assert client.pair.free_receives == 8


async def test_an_event_loop_is_woken_by_completions(binding: str) -> None:
    loop = asyncio.get_running_loop()
    with connected(binding, binding) as (node, client):
        done = asyncio.Event()
        found = []

        def collect() -> None:
            while batch := node.completions.collect(2):
                found.extend(batch)
                if len(batch) < 2:
                    break
            if len(found) == 5:
                done.set()

        loop.add_reader(node.completions.fileno(), collect)
        try:
            for number in range(5):
                (chain,) = node.pair.plan([Read((node.region.local(0, 64),), client.region.remote(64 * number, 64))])
                node.pair.post(chain, number)
            await asyncio.wait_for(done.wait(), 60)
        finally:
            loop.remove_reader(node.completions.fileno())
        assert [each.token for each in found] == [0, 1, 2, 3, 4]


def test_collect_never_blocks_and_keeps_to_its_limit(binding: str) -> None:
    with connected(binding, binding) as (node, client):
        assert node.completions.collect() == []
        assert not node.completions.wait(0)
        for number in range(5):
            (chain,) = node.pair.plan([Read((node.region.local(0, 8),), client.region.remote(0, 8))])
            node.pair.post(chain, number)
        assert len(node.collect(3)) == 3
        assert len(node.collect(2)) == 2
        assert node.completions.outstanding == 0


def test_a_full_queue_refuses_a_chain_before_any_of_it_is_posted(binding: str) -> None:
    with connected(binding, binding, send_requests=4) as (node, client):
        block = Read((node.region.local(0, 8),), client.region.remote(0, 8))
        (three,) = node.pair.plan([block] * 3)
        node.pair.post(three, "three")
        with pytest.raises(ResourceExhaustedError) as caught:
            node.pair.post(three, "more")
        assert caught.value.reason == "RDMA_QUEUE_FULL"
        assert node.completions.outstanding == 1
        (ended,) = node.collect(1)
        assert (ended.token, ended.ok) == ("three", True)
        node.pair.post(three, "more")
        assert node.collect(1)[0].ok


def test_sides_of_different_mtu_meet_at_the_smaller(binding: str) -> None:
    content = os.urandom(100_000)
    near, far = Side(binding, mtu_bytes=256), Side(binding, access=Access.REMOTE)
    with closing(near), closing(far):
        assert near.pair.endpoint.mtu_bytes == 256 < far.pair.endpoint.mtu_bytes
        near.pair.connect(far.pair.endpoint)
        far.pair.connect(near.pair.endpoint)
        far.memory[: len(content)] = content
        (ended,) = near.run(Read((near.region.local(0, len(content)),), far.region.remote(0, len(content))))
        assert ended.ok
        assert near.memory[: len(content)] == content
