"""Who may do what: I1, I2, I3, I12."""

from __future__ import annotations

from contextlib import suppress

from tests.isolation.adapter import MIB, NotOfferedError, Put, Quota, StoreAdapter, TenantClient
from tests.isolation.blocks import key_of, value_of
from tests.isolation.table import Verdict, case
from tests.support.waiting import wait_until

PAIR = {"a": Quota(16 * MIB), "b": Quota(16 * MIB)}
BLOCK_BYTES = 65_536
SETTLE_S = 20.0
ARRIVAL_S = 5.0
#: So many entries there, of a hundred, are more than DRAM holds.
ON_BOTH_TIERS = 50


@case("I1", "a process that merely says it is tenant b")
def merely_says_who_it_is(adapter: StoreAdapter) -> Verdict:
    with adapter.store(PAIR, capacity_bytes=64 * MIB) as store:
        key, value = key_of(1), value_of("b", 1, 4096)
        owner = store.client("b")
        owner.put([(key, value)])
        attempts = store.impersonate("b", "a", key, value_of("forged", 1, 4096))
        opened = [attempt.how for attempt in attempts if attempt.opened]
        read = [attempt.how for attempt in attempts if attempt.value is not None]
        intact = owner.get([key]) == [value]
    detail = f"{len(attempts)} tricks, {len(opened)} opened a session, {len(read)} read a byte"
    told = f": {', '.join(opened + read)}" if opened or read else f"; b's bytes {'intact' if intact else 'CHANGED'}"
    return Verdict(bool(attempts) and not opened and not read and intact, detail + told)


@case("I1", "raising one's own quota and wiping a neighbour without an administrator's credential")
def administers_without_right(adapter: StoreAdapter) -> Verdict:
    with adapter.deployment(PAIR, capacity_bytes=64 * MIB) as deployment:
        key, value = key_of(900), value_of("b", 900, 4096)
        deployment.client("b").put([(key, value)])
        answers = deployment.administer_without_right("a", "b")
        done = [what for what, answer in answers.items() if not answer]
        intact = deployment.client("b").get([key]) == [value]
    detail = f"{len(answers)} attempts, done: {', '.join(done) or 'none'}; answers {sorted({*answers.values()})}"
    return Verdict(bool(answers) and not done and intact, detail)


@case("I2", "the same key in two tenants")
def same_key_in_two_tenants(adapter: StoreAdapter) -> Verdict:
    with adapter.store(PAIR, capacity_bytes=64 * MIB) as store:
        a, b, key = store.client("a"), store.client("b"), key_of(1)
        before = b.get([key]), b.exists([key])
        puts = [*a.put([(key, value_of("a", 1, 5000))])]
        unseen = b.get([key]) == [None] and b.exists([key]) == [False] and b.delete([key]) == 0
        puts += b.put([(key, value_of("b", 1, 7000))])
        own = a.get([key]) == [value_of("a", 1, 5000)] and b.get([key]) == [value_of("b", 1, 7000)]
        b.delete([key])
        kept = a.get([key]) == [value_of("a", 1, 5000)]
    holds = before == ([None], [False]) and unseen and own and kept and puts == [Put.STORED, Put.STORED]
    detail = f"{', '.join(puts)}; each reads its own bytes: {own}, neither sees the other's: {unseen and kept}"
    return Verdict(holds, detail)


@case("I2", 'look-alike names never collide: ("a", "b-c") and ("a-b", "c"), ("a", "b") and "a\\0b"')
def look_alike_names(adapter: StoreAdapter) -> Verdict:
    namespaces = [("a", "b-c"), ("a-b", "c"), ("a", "bc"), ("ab", "c"), ("a", "b"), ("a\0b", "c"), ("a", "b\0c"),
                  ("a", "B"), ("a", "b/"), ("a", "chat"), ("chat", "a"), ("a", "a")]  # fmt: skip
    quotas = {tenant: Quota(4 * MIB) for tenant in dict.fromkeys(tenant for tenant, _ in namespaces)}
    with adapter.store(quotas, capacity_bytes=64 * MIB) as store:
        key, open_pairs, refused = key_of(1), [], []
        for tenant, namespace in namespaces:
            try:
                client = store.client(tenant, namespace)
                if client.put([(key, value_of(f"{tenant}|{namespace}", 1, 512))]) == [Put.STORED]:
                    open_pairs.append((tenant, namespace))
                else:
                    refused.append((tenant, namespace))
            except NotOfferedError:
                refused.append((tenant, namespace))
        if not any(namespace != "chat" for _, namespace in open_pairs):
            raise NotOfferedError("there are no namespaces")
        mixed = [
            f"{tenant!r}/{namespace!r}"
            for tenant, namespace in open_pairs
            if store.client(tenant, namespace).get([key]) != [value_of(f"{tenant}|{namespace}", 1, 512)]
        ]
    detail = f"{len(open_pairs)} kept apart, {len(refused)} refused as no name; mixed up: {', '.join(mixed) or 'none'}"
    return Verdict(len(open_pairs) >= 6 and not mixed, detail)


@case("I2", "bytes of one tenant where another's should be are never delivered")
def foreign_bytes(adapter: StoreAdapter) -> Verdict:
    with adapter.store(PAIR, capacity_bytes=64 * MIB) as store:
        store.client("a").put([(key_of(1), value_of("a", 1, 8192))])
        store.client("b").put([(key_of(2), value_of("b", 2, 8192))])
        store.swap_bytes("b", key_of(2), "a", key_of(1))
        [got] = store.client("b").get([key_of(2)])
    return Verdict(got is None, f"b reads its entry, whose memory now holds a's bytes: {_told(got)}")


@case("I2", "sharing on purpose: nothing with one side's consent, both ways with both, nothing once one has left")
def shares_by_consent(adapter: StoreAdapter) -> Verdict:
    with adapter.store(PAIR, capacity_bytes=64 * MIB) as store:
        private, shared, own = key_of(1), key_of(2), key_of(3)
        store.client("a").put([(private, value_of("a", 1, 4096))])
        store.agree_to_share("a", "b")
        store.shared_client("a").put([(shared, value_of("a", 2, 4096))])
        alone = store.shared_client("b").get([private, shared])
        store.agree_to_share("b", "a")
        a, b = store.shared_client("a"), store.shared_client("b")
        b.put([(own, value_of("b", 3, 4096))])
        both = b.get([private, shared]) + a.get([own])
        kept = b.delete([shared]) == 0 and a.get([shared]) == [value_of("a", 2, 4096)]
        store.stop_sharing("b")
        after = b.get([shared]) + a.get([shared, own])
        after += store.shared_client("a").get([shared, own]) + store.shared_client("b").get([shared])
        untouched = store.client("a").get([private]) == [value_of("a", 1, 4096)]
    expected = [None, value_of("a", 2, 4096), value_of("b", 3, 4096)]
    holds = alone == [None, None] and both == expected and kept and untouched and not any(after)
    detail = f"one consents: {_count(alone)} of 2 read; both: {_count(both)} of 2, and nothing private"
    return Verdict(holds, f"{detail}; after leaving: {_count(after)} of 6; a's own and its shared bytes kept: {kept}")


@case("I5", "a member of a sharing group reads all that another has, deletes it and floods: the other loses nothing")
def greedy_member(adapter: StoreAdapter) -> Verdict:
    quotas = {"a": Quota(8 * MIB, 8 * MIB), "b": Quota(8 * MIB)}
    with adapter.store(quotas, capacity_bytes=32 * MIB) as store:
        store.agree_to_share("a", "b")
        store.agree_to_share("b", "a")
        a, b = store.shared_client("a"), store.shared_client("b")
        mine = {key_of(n): value_of("a", n, BLOCK_BYTES) for n in range(100)}
        stored = a.put(list(mine.items()))
        before = store.used_bytes("a")
        read = sum(b.get([key]) == [value] for key, value in mine.items())
        b.delete(list(mine))
        b.put([(key_of(n), value_of("b", n, BLOCK_BYTES)) for n in range(1000, 1300)])
        kept = a.get(list(mine)) == list(mine.values())
        more = a.put([(key_of(n), value_of("a", n, BLOCK_BYTES)) for n in range(200, 220)])
        books = store.used_bytes("a") - before == 20 * BLOCK_BYTES and store.used_bytes("b") <= 8 * MIB
    holds = {*stored, *more} == {Put.STORED} and read == len(mine) and kept and books
    return Verdict(
        holds, f"b read {read} of {len(mine)}, deleted and flooded; a kept all: {kept}; books exact: {books}"
    )


@case("I3", "overwriting another tenant's bytes")
def overwrites_a_neighbour(adapter: StoreAdapter) -> Verdict:
    with adapter.store(PAIR, capacity_bytes=64 * MIB) as store:
        owner, key, value = store.client("b"), key_of(1), value_of("b", 1, 65536)
        owner.put([(key, value)])
        tried = store.overwrite("b", "a", key, value_of("forged", 1, 65536))
        intact = owner.get([key]) == [value]
    return Verdict(
        bool(tried) and intact, f"{'; '.join(tried)}: b reads {'its own bytes' if intact else 'FORGED BYTES'}"
    )


@case("I12", "remove-all of one tenant: its own is gone at once, nobody else loses anything")
def remove_all_of_one(adapter: StoreAdapter) -> Verdict:
    with adapter.store({**PAIR, "c": Quota(16 * MIB)}, capacity_bytes=64 * MIB) as store:
        keys = [key_of(number) for number in range(100)]
        for tenant in ("a", "b", "c"):
            store.client(tenant).put([(key, value_of(tenant, 1, 4096)) for key in keys])
        gone = store.client("a")
        others = {tenant: store.used_bytes(tenant) for tenant in ("b", "c")}
        store.remove_all("a")
        left = 0
        with suppress(NotOfferedError):
            left = sum(gone.exists(keys))
        kept = {tenant: sum(value is not None for value in store.client(tenant).get(keys)) for tenant in others}
        books = all(store.used_bytes(tenant) == used for tenant, used in others.items())
        charged_bytes = store.used_bytes("a")
    detail = f"a: {left} of 100 left, {charged_bytes} bytes charged; b, c: {kept['b']}, {kept['c']} of 100 kept"
    return Verdict(left == 0 and charged_bytes == 0 and set(kept.values()) == {100} and books, detail)


@case("I12", "remove-all of one tenant touches nobody else's SSD")
def remove_all_beside_ssd(adapter: StoreAdapter) -> Verdict:
    quotas = {tenant: Quota(2 * MIB, ssd_limit_bytes=16 * MIB) for tenant in ("a", "b")}
    with adapter.store(quotas, capacity_bytes=8 * MIB) as store:
        keys = [key_of(number) for number in range(100)]
        for key in keys:  # more than DRAM takes: most of it ends on SSD
            for tenant in quotas:
                store.client(tenant).put([(key, value_of(tenant, 1, BLOCK_BYTES))])
        # What has reached SSD settles; what staging could not take is gone, as after any eviction.
        wait_until(lambda: min(store.ssd_used_bytes(tenant) for tenant in quotas) > 2 * MIB, SETTLE_S)
        gone, kept = store.client("a"), store.client("b")
        # It is charged before it is written, and found afterwards.
        wait_until(lambda: min(sum(gone.exists(keys)), sum(kept.exists(keys))) > ON_BOTH_TIERS, SETTLE_S)
        before = kept.exists(keys)
        store.remove_all("a")
        left = 0
        with suppress(NotOfferedError):
            left = sum(gone.exists(keys))
        values = [_settled(kept, key) for key, was_there in zip(keys, before, strict=True) if was_there]
        right = sum(value == value_of("b", 1, BLOCK_BYTES) for value in values)
        wait_until(lambda: store.ssd_used_bytes("a") == 0, SETTLE_S)
    detail = f"a: {left} of 100 left, nothing charged; b: {right} of {sum(before)} kept, most of them on SSD"
    return Verdict(left == 0 and right == sum(before) > ON_BOTH_TIERS, detail)


def _settled(client: TenantClient, key: bytes) -> bytes | None:
    """What lies under ``key``. Reading moves others from DRAM to SSD, and one on its way there is a miss meanwhile."""
    values: list[bytes | None] = []

    def is_there() -> bool:
        values.extend(client.get([key]))
        return values[-1] is not None

    with suppress(AssertionError):
        wait_until(is_there, ARRIVAL_S)
    return values[-1]


def _told(value: bytes | None) -> str:
    return "a miss" if value is None else f"{len(value)} bytes DELIVERED"


def _count(values: list[bytes | None]) -> int:
    return sum(value is not None for value in values)
