"""What a tenant is promised and may hold, whatever its neighbours do: I4, I5, I6, I8."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.isolation.adapter import MIB, Put, Quota, StoreAdapter, TenantClient
from tests.isolation.blocks import key_of, value_of
from tests.isolation.table import Verdict, case

BLOCK_BYTES = 65536
FLAT_BYTES = 8 * MIB
_is_full_length = False


def full_length() -> None:
    """From now on cases take as long as it takes to be sure."""
    global _is_full_length
    _is_full_length = True


@case("I4", "a quota is never passed, at any instant, while its owner floods")
def quota_under_flood(adapter: StoreAdapter) -> Verdict:
    limit_bytes, offered_bytes = 16 * MIB, 272 * MIB
    with adapter.store({"a": Quota(limit_bytes), "b": Quota(16 * MIB)}, capacity_bytes=64 * MIB) as store:
        seen: list[int] = []
        with _in_background(lambda: seen.append(store.used_bytes("a"))):
            outcomes = _flood(store.client("a"), offered_bytes)
        most_bytes = max(seen)
    detail = (
        f"{offered_bytes // MIB} MiB offered to {limit_bytes // MIB} MiB: most seen {most_bytes} in {len(seen)} looks"
    )
    holds = most_bytes <= limit_bytes and outcomes[Put.STORED] > 0 and len(seen) > 10
    return Verdict(holds, f"{detail}; {outcomes[Put.REFUSED]} refused")


@case("I4", "a quota shrunk below use")
def shrunk_below_use(adapter: StoreAdapter) -> Verdict:
    with adapter.store({"a": Quota(16 * MIB), "b": Quota(16 * MIB)}, capacity_bytes=64 * MIB) as store:
        for tenant in ("a", "b"):
            store.client(tenant).put([(key_of(n), value_of(tenant, n, BLOCK_BYTES)) for n in range(200)])
        before_bytes, limit_bytes = store.used_bytes("a"), 4 * MIB
        store.set_limit("a", limit_bytes)
        after_bytes = store.used_bytes("a")
        left = [n for n, value in enumerate(store.client("a").get([key_of(n) for n in range(200)])) if value]
        others = sum(store.client("b").exists([key_of(n) for n in range(200)]))
    exact = after_bytes == len(left) * BLOCK_BYTES
    detail = (
        f"{before_bytes} -> {after_bytes} of {limit_bytes} at once, {len(left)} entries left, b kept {others} of 200"
    )
    return Verdict(0 < after_bytes <= limit_bytes and exact and others == 200, detail)


@case(
    "I4", "a namespace floods past its limit within the tenant: never passed, and the tenant's other one loses nothing"
)
def namespace_under_flood(adapter: StoreAdapter) -> Verdict:
    limit_bytes, offered_bytes = 4 * MIB, 64 * MIB
    with adapter.store({"a": Quota(16 * MIB)}, capacity_bytes=64 * MIB) as store:
        keys = [key_of(number) for number in range(120)]
        production = store.client("a")
        production.put([(key, value_of("a", 1, BLOCK_BYTES)) for key in keys])
        own_bytes = store.used_bytes("a")
        store.limit_namespace("a", "bulk", limit_bytes)
        seen: list[int] = []
        with _in_background(lambda: seen.append(store.used_bytes("a") - own_bytes)):
            outcomes = _flood(store.client("a", "bulk"), offered_bytes)
        kept = sum(value == value_of("a", 1, BLOCK_BYTES) for value in production.get(keys))
        store.limit_namespace("a", "bulk", limit_bytes // 4)
        lowered_bytes = store.used_bytes("a") - own_bytes
    detail = (
        f"{offered_bytes // MIB} MiB offered to {limit_bytes // MIB} MiB: most seen {max(seen)} in {len(seen)} looks;"
        f" the other has {kept} of 120; lowered to {limit_bytes // 4}: {lowered_bytes}"
    )
    is_within = max(seen) <= limit_bytes and 0 < lowered_bytes <= limit_bytes // 4
    return Verdict(is_within and kept == 120 and outcomes[Put.STORED] > 0 and len(seen) > 10, detail)


@case("I5", "a tenant inside its quota loses nothing to a neighbour's churn")
def neighbours_churn(adapter: StoreAdapter) -> Verdict:
    return _churn_beside(adapter, {"a": Quota(16 * MIB), "b": Quota(48 * MIB)})


@case("I5", "a tenant inside its reservation loses nothing where limits add up to more than there is")
def churn_in_an_overcommitted_pool(adapter: StoreAdapter) -> Verdict:
    return _churn_beside(adapter, {"a": Quota(16 * MIB, reserved_bytes=8 * MIB), "b": Quota(64 * MIB)})


def _churn_beside(adapter: StoreAdapter, quotas: dict[str, Quota]) -> Verdict:
    with adapter.store(quotas, capacity_bytes=64 * MIB) as store:
        keys = [key_of(number) for number in range(120)]
        owner = store.client("a")
        owner.put([(key, value_of("a", 1, BLOCK_BYTES)) for key in keys])
        outcomes = _flood(store.client("b"), 256 * MIB)
        kept = sum(value == value_of("a", 1, BLOCK_BYTES) for value in owner.get(keys))
    return Verdict(kept == 120, f"{outcomes.total()} puts of b: a has {kept} of 120 objects")


@case("I5", "writes within the quota during a neighbour's flood: each that was acknowledged is there")
def writes_beside_a_flood(adapter: StoreAdapter) -> Verdict:
    quotas = {"a": Quota(16 * MIB), "b": Quota(48 * MIB)}
    with adapter.store(quotas, capacity_bytes=64 * MIB) as store:
        owner, flooding = store.client("a"), store.client("b")
        _flood(flooding, 64 * MIB)
        with _in_background(lambda: _flood(flooding, 16 * MIB)):
            puts = [owner.put([(key_of(n), value_of("a", n, MIB))])[0] for n in range(8)]
        kept = sum(value == value_of("a", n, MIB) for n, value in enumerate(owner.get([key_of(n) for n in range(8)])))
    return Verdict(puts == [Put.STORED] * 8 and kept == 8, f"{puts.count(Put.STORED)} of 8 stored, {kept} readable")


@case("I5", "100 idle tenants do not dilute an active one")
def idle_tenants(adapter: StoreAdapter) -> Verdict:
    quotas = {f"idle-{number}": Quota(32 * MIB) for number in range(100)} | {"active": Quota(32 * MIB)}
    with adapter.store(quotas, capacity_bytes=64 * MIB) as store:
        active = store.client("active")
        keys = [key_of(number) for number in range(500)]
        puts = Counter(active.put([(key, value_of("active", 1, BLOCK_BYTES)) for key in keys]))
        there, used_bytes = sum(active.exists(keys)), store.used_bytes("active")
    holds = puts[Put.STORED] == there == 500 and used_bytes == 500 * BLOCK_BYTES
    return Verdict(holds, f"{puts[Put.STORED]} of 500 stored, {there} there: {used_bytes} of {32 * MIB} bytes used")


@case("I6", "one put larger than the quota is refused before anything is evicted")
def larger_than_the_quota(adapter: StoreAdapter) -> Verdict:
    with adapter.store({"a": Quota(4 * MIB)}, capacity_bytes=64 * MIB) as store:
        client, keys = store.client("a"), [key_of(number) for number in range(60)]
        client.put([(key, value_of("a", 1, BLOCK_BYTES)) for key in keys])
        [answer] = client.put([(key_of(1000), value_of("a", 1000, 5 * MIB))])
        left = sum(client.exists(keys))
    return Verdict(answer is Put.REFUSED and left == 60, f"5 MiB into 4 MiB: {answer}; {left} of 60 others left")


@case("I6", "polling the existence of every key does not make puts fail")
def polling_existence(adapter: StoreAdapter) -> Verdict:
    with adapter.store({"a": Quota(8 * MIB)}, capacity_bytes=64 * MIB) as store:
        client, polling = store.client("a"), store.client("a")
        keys = [key_of(number) for number in range(600)]
        polls: list[int] = []
        with _in_background(lambda: polls.append(sum(polling.exists(keys)))):
            puts = Counter(client.put([(key, value_of("a", 1, BLOCK_BYTES))])[0] for key in keys)
    holds = puts[Put.STORED] == 600 and len(polls) > 3 and max(polls) > 0
    return Verdict(holds, f"{puts[Put.STORED]} of 600 puts into room for 128 stored during {len(polls)} polls")


@case("I6", "duplicate keys in one batch")
def duplicates_in_a_batch(adapter: StoreAdapter) -> Verdict:
    with adapter.store({"a": Quota(8 * MIB)}, capacity_bytes=64 * MIB) as store:
        client, key = store.client("a"), key_of(1)
        first = value_of("a", 1, 4096)
        later = value_of("a", 2, 4096)
        puts = client.put([(key, first), (key_of(2), first), (key, first), (key, later)])
        got = client.get([key, key_of(2), key])
        used_bytes = store.used_bytes("a")
        deleted = client.delete([key, key])
    # Which of them stays is the store's own rule; it must be one, whole, for every reader, and charged once.
    holds = Put.REFUSED not in puts and got[0] in (first, later) and got == [got[0], first, got[0]]
    detail = f"{', '.join(puts)}; {_kept(got[0], first, later)} is read; charged {used_bytes}, deleted {deleted}"
    return Verdict(holds and used_bytes == 8192 and deleted == 1, detail)


@case("I8", "one batch of 3,000 and one of 100,000 keys work, and the client afterwards")
def large_batches(adapter: StoreAdapter) -> Verdict:
    told, holds = [], True
    with adapter.store({"a": Quota(256 * MIB)}, capacity_bytes=256 * MIB) as store:
        client = store.client("a")
        for count, offset in ((3_000, 0), (100_000, 10**6)):
            keys = [key_of(offset + number) for number in range(count)]
            puts = Counter(client.put([(key, key[-8:]) for key in keys]))
            found = client.exists(keys)
            values = client.get(keys)
            right = sum(value == key[-8:] for key, value in zip(keys, values, strict=True))
            # An entry takes 4 KiB: of more some are evicted, and entries read before may outlive newer ones.
            room = 256 * MIB // 4096 - 3_000
            told.append(f"{count}: {puts[Put.STORED]} stored, {sum(found)} there, {right} read")
            holds = holds and puts[Put.STORED] == count and right == sum(found) >= min(count, room)
        again = client.put([(key_of(7), b"again")]) == [Put.STORED] and client.get([key_of(7)]) == [b"again"]
    return Verdict(holds and again, "; ".join(told))


@case("I8", "10^6 puts and removes leave books and memory flat")
def books_and_memory_stay_flat(adapter: StoreAdapter) -> Verdict:
    """10^5 of them where a minute is too long; see :func:`full_length`."""
    rounds = 1000 if _is_full_length else 100
    with adapter.store({"a": Quota(32 * MIB)}, capacity_bytes=64 * MIB) as store:
        client = store.client("a")

        def churn(rounds: int, first: int) -> None:
            for number in range(rounds):
                keys = [key_of(first + number * 1000 + n) for n in range(1000)]
                assert client.put([(key, key * 4) for key in keys]).count(Put.STORED) == 1000
                assert client.delete(keys) == 1000

        churn(20, 0)
        before_bytes = _resident_bytes()
        churn(rounds, 10**6)
        grown_bytes, used_bytes = _resident_bytes() - before_bytes, store.used_bytes("a")
    holds = used_bytes == 0 and grown_bytes < FLAT_BYTES
    told = (
        f"{rounds * 1000} puts and removes: {used_bytes} bytes charged; resident memory grew by {grown_bytes:,} bytes"
    )
    return Verdict(holds, told)


def _kept(got: bytes | None, first: bytes, later: bytes) -> str:
    return "the first" if got == first else "the last" if got == later else "nothing" if got is None else "A MIXTURE"


def _flood(client: TenantClient, total_bytes: int) -> Counter[Put]:
    """Put fresh blocks until ``total_bytes`` were offered."""
    outcomes: Counter[Put] = Counter()
    first = int.from_bytes(os.urandom(6), "big") << 16
    value = value_of("flood", 1, BLOCK_BYTES)
    for start in range(0, total_bytes // BLOCK_BYTES, 64):
        outcomes += Counter(client.put([(key_of(first + start + n), value) for n in range(64)]))
    return outcomes


@contextmanager
def _in_background(action: Callable[[], object]) -> Iterator[None]:
    """Do ``action`` again and again in another thread for the time of the block; what it raises is raised here."""
    stop, errors = threading.Event(), list[BaseException]()

    def loop() -> None:
        try:
            while not stop.is_set():
                action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
