"""Whole or absent, in time or a miss, with or without the control plane: I7, I9, I10."""

from __future__ import annotations

from tests.isolation.adapter import MIB, Over, Put, Quota, StoreAdapter
from tests.isolation.blocks import key_of, value_of
from tests.isolation.table import Verdict, case

LARGE_BYTES = 8 * MIB


@case("I7", "a slow read while its entry is evicted and its memory would be reused, over TCP")
def slow_read(adapter: StoreAdapter) -> Verdict:
    return _slow_read(adapter, Over.TCP)


@case("I7", "a slow read while its entry is evicted and its memory would be reused, over shared memory")
def slow_read_over_shared_memory(adapter: StoreAdapter) -> Verdict:
    return _slow_read(adapter, Over.SHM)


def _slow_read(adapter: StoreAdapter, over: Over) -> Verdict:
    with adapter.store({"a": Quota(32 * MIB), "b": Quota(40 * MIB)}, capacity_bytes=40 * MIB) as store:
        key, value = key_of(1), value_of("a", 1, LARGE_BYTES)
        owner, neighbour = store.client("a"), store.client("b")
        owner.put([(key, value)])
        gone = []

        def evict_and_reuse() -> None:
            owner.put([(key_of(n), value_of("a", n, LARGE_BYTES)) for n in range(2, 8)])
            owner.delete([key])
            gone.append(owner.exists([key]) == [False])
            neighbour.put([(key_of(n), value_of("b", n, MIB)) for n in range(100, 160)])

        got = store.slow_get("a", key, evict_and_reuse, over=over)
        owner.delete([key_of(n) for n in range(2, 8)])
        charged_bytes = store.used_bytes("a")
    told = "absent" if got is None else "whole" if got == value else "OTHER BYTES"
    detail = f"entry gone meanwhile: {gone}; the reader got it {told}; charged after it: {charged_bytes}"
    return Verdict((got is None or got == value) and gone == [True] and charged_bytes == 0, detail)


@case("I7", "half a value sent, then read by a second client, over TCP")
def half_a_value(adapter: StoreAdapter) -> Verdict:
    return _half_a_value(adapter, Over.TCP)


@case("I7", "half a value sent, then read by a second client, over shared memory")
def half_a_value_over_shared_memory(adapter: StoreAdapter) -> Verdict:
    return _half_a_value(adapter, Over.SHM)


def _half_a_value(adapter: StoreAdapter, over: Over) -> Verdict:
    with adapter.store({"a": Quota(32 * MIB)}, capacity_bytes=40 * MIB) as store:
        client, key, value = store.client("a"), key_of(1), value_of("a", 1, MIB)
        with store.half_put("a", key, value, over=over):
            got, there = client.get([key]), client.exists([key])
            during_bytes = store.used_bytes("a")
        stored = client.put([(key, value)]) == [Put.STORED] and client.get([key]) == [value]
        after_bytes = store.used_bytes("a")
    detail = f"read {got}, exists {there}, charged {during_bytes}; after the writer's death a put of it works: {stored}"
    return Verdict(got == [None] and there == [False] and stored and after_bytes == MIB, detail)


@case("I7", "a wrong-sized buffer: too short, too long")
def wrong_sized_buffer(adapter: StoreAdapter) -> Verdict:
    with adapter.store({"a": Quota(32 * MIB)}, capacity_bytes=40 * MIB) as store:
        client, key, value = store.client("a"), key_of(1), value_of("a", 1, 10_000)
        client.put([(key, value)])
        short, long = bytearray(b"\xee" * 9_999), bytearray(b"\xee" * 20_000)
        answers = client.get_into(key, short), client.get_into(key, long)
        alive = client.get([key]) == [value]
    beyond = bytes(long[10_000:]) == b"\xee" * 10_000
    holds = answers == (None, 10_000) and bytes(long[:10_000]) == value and beyond and alive
    return Verdict(
        holds, f"1 byte short: {answers[0]}; 10,000 too long: {answers[1]}, nothing written past it: {beyond}"
    )


@case("I9", "a restart of what manages the store loses no key")
def management_restart(adapter: StoreAdapter) -> Verdict:
    with adapter.deployment({"a": Quota(16 * MIB), "b": Quota(16 * MIB)}, capacity_bytes=64 * MIB) as deployment:
        keys = [key_of(number) for number in range(100)]
        clients = {tenant: deployment.client(tenant) for tenant in ("a", "b")}
        for tenant, client in clients.items():
            client.put([(key, value_of(tenant, 1, 4096)) for key in keys])

        def there() -> list[int]:
            return [
                sum(value == value_of(tenant, 1, 4096) for value in client.get(keys))
                for tenant, client in clients.items()
            ]

        during: list[int] = []
        deployment.restart_management(lambda: during.extend(there()))
        after = there()
        writes = [client.put([(key_of(500), b"new")])[0] for client in clients.values()]
    holds = during == after == [100, 100] and writes == [Put.STORED] * 2
    told = f"keys of a and b while it was down: {during}, after: {after}; new puts: {', '.join(writes)}"
    return Verdict(holds, told)


@case("I10", "a frozen store never blocks the client")
def frozen_store(adapter: StoreAdapter) -> Verdict:
    with adapter.frozen_store() as store:
        store.freeze()
        ended, ticks = store.call_beside_a_ticking_loop()
    return Verdict(ended.startswith("miss") and ticks >= 5, f"a read: {ended}; the loop ticked {ticks} times")
