"""I5 as a promise of hits: how much of a reservation is protected follows from what the solo cache would have hit."""

from __future__ import annotations

from dataplane.core import earning
from dataplane.core.earning import EarningAccount, is_sampled
from dataplane.core.entry import Entry, Pin
from dataplane.core.eviction import Eviction
from dataplane.core.extents import ArenaOffset
from dataplane.core.lru import LruOrder
from dataplane.core.partition import Partition
from dataplane.core.reservations import Reservations
from dataplane.core.tenant_cache import PartitionIndex, TenantCache
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId
from tests.support.cache_node import Node, key_of, make_policy, node_of

G = 4096
TENANT = TenantId("a")
INDEX = PartitionIndex(Partition(TENANT, NamespaceId("ns"), "u", 1), TenantCache(TENANT, LruOrder()), G, True)


def sampled(count: int, start: int = 0) -> list[BlockKey]:
    keys = (BlockKey(n.to_bytes(16, "big") + bytes(16)) for n in range(start, start + count * earning.SAMPLE_ONE_IN))
    return [key for key in keys if is_sampled(key)]


def account(reserved_entries: int) -> EarningAccount:
    made = EarningAccount()
    made.set_reserved(reserved_entries * G)
    return made


def hit(key: BlockKey) -> Pin:
    return Pin(ArenaOffset(0), G, 0, Entry(key, INDEX, ArenaOffset(0), G, G))


def hits(made: EarningAccount, keys: list[BlockKey]) -> None:
    for key in keys:
        made.looked_up([key], [hit(key)])


def misses(made: EarningAccount, keys: list[BlockKey]) -> None:
    for key in keys:
        made.looked_up([key], [None])


def stored(made: EarningAccount, keys: list[BlockKey]) -> None:
    for key in keys:
        made.stored(key, G)


def test_i5_a_new_tenant_is_protected_in_full() -> None:
    assert account(100).protected_bytes == 100 * G


def test_i5_hits_that_the_solo_cache_has_too_lend_nothing() -> None:
    made = account(1_000)
    keys = sampled(100)
    stored(made, keys)
    for _ in range(10):
        hits(made, keys)
    assert made.protected_bytes == 1_000 * G


def test_i5_a_lead_lends_and_falling_behind_takes_back() -> None:
    made = account(1_000)
    keys = sampled(400)  # the solo cache could sample 500 of them, but knows none yet
    hits(made, keys)
    assert made.protected_bytes == 0, "the lead is a fifth of the reservation and more"
    misses(made, keys)  # now the solo cache holds them, and the real one has lost them
    assert made.protected_bytes == 1_000 * G


def test_i5_protection_is_never_more_than_the_reservation() -> None:
    made = account(10)
    for key in sampled(50):
        made.stored(key, G)
        misses(made, [key])
        assert 0 <= made.protected_bytes <= 10 * G
    made.set_reserved(0)
    assert made.protected_bytes == 0


def test_hits_behind_a_gap_earn_nothing() -> None:
    made = account(1_000)
    keys = sampled(50)
    for key in keys:
        made.looked_up([BlockKey(bytes(32)), key], [None, hit(key)])
    assert made.protected_bytes == 1_000 * G


def test_a_scan_lends_its_reservation_and_gets_it_back_when_it_earns() -> None:
    made = account(1_000)
    for key in sampled(20_000):
        misses(made, [key])
        made.stored(key, G)
    assert not made.earns and made.protected_bytes == 0
    again = sampled(100, start=10**9)
    for _ in range(20):
        for key in again:
            misses(made, [key])
            made.stored(key, G)
    assert made.earns and made.protected_bytes == 1_000 * G, "the solo cache would serve it: protected on demand"


def test_i5_a_key_that_lookups_do_not_find_is_one_miss_until_it_is_stored() -> None:
    made = account(1_000)
    keys = sampled(50)
    hits(made, sampled(400, start=10**9))  # a lead of all that there can be
    stored(made, keys)
    for _ in range(3):
        made.not_found(keys)
    misses(made, keys)  # whoever reads what it has looked up
    protected_bytes = made.protected_bytes
    assert protected_bytes == 50 * G * earning.SAMPLE_ONE_IN * 5
    stored(made, keys)
    assert made.protected_bytes == protected_bytes
    made.not_found(keys)
    assert made.protected_bytes == 2 * protected_bytes, "lost again"


def test_a_scan_that_looks_up_lends_its_reservation_where_it_stores() -> None:
    made, other_node = account(1_000), account(1_000)
    for key in sampled(20_000):
        made.not_found([key])
        other_node.not_found([key])
        made.stored(key, G)
    assert not made.earns and made.protected_bytes == 0
    assert other_node.earns, "it was asked for what another one has"


def test_what_lookups_missed_is_remembered_within_bounds() -> None:
    made = account(1_000)
    made.not_found(sampled(3 * earning._NOTED_MAX))
    assert len(made._noted) == earning._NOTED_MAX


def test_a_deleted_key_is_owed_to_nobody() -> None:
    made = account(100)
    key = sampled(1)[0]
    made.stored(key, G)
    made.deleted(key)
    misses(made, [key])
    assert made.protected_bytes == 100 * G


# ---- through the core


def use(node: Node, tenant: str, number: int) -> bool:
    """A get, and a put where it missed; True for a hit."""
    pins = node.core.get_start(node.partition(tenant), [key_of(number)], node.tick())
    node.core.get_end(pins)
    return pins != [None] or node.put(tenant, number) is not None


def test_i5_a_scans_reservation_serves_a_neighbour_that_hits_under_earning_alone() -> None:
    """Five of eight granules reserved by a tenant that never hits; its neighbour works on a set of six."""
    rates = {}
    for reservations in Reservations:
        node = node_of(8, {"scan": (5, 8), "busy": (0, 8)}, Eviction.TWO_QUEUE, reservations)
        for number in range(9_000):
            node.core.get_start(node.partition("scan"), [key_of(10**6 + number)], node.tick())
        for number in range(5):
            node.put("scan", number)
        found = 0
        for turn in range(120):
            found += use(node, "busy", turn % 6)
            node.put("scan", 100 + turn)
        rates[reservations] = found
        assert node.used("scan") + node.used("busy") == 8
        node.core.check_invariants()
    assert rates[Reservations.STRICT] == 0, "a cycle of six through three granules"
    assert rates[Reservations.EARNING] > 90


def test_i5_what_was_lent_is_free_for_its_owner_within_its_reservation() -> None:
    node = node_of(16, {"owner": (8, 16), "borrower": (0, 16)}, Eviction.TWO_QUEUE, Reservations.EARNING)
    node.fill("borrower", range(16))
    for number in range(8):
        assert node.put("owner", number) is None
    assert (node.used("owner"), node.used("borrower")) == (8, 8)


def test_i5_a_lookup_notes_what_is_on_no_tier_and_a_read_the_rest() -> None:
    node = node_of(8, {"a": (4, 8)}, Eviction.TWO_QUEUE, Reservations.EARNING)
    made = node.core._pool.tenants[TENANT].account
    assert made is not None
    node.put("a", 1)
    assert node.core.lookup(node.partition("a"), [key_of(1), key_of(2)]) == (1, b"\1\0")
    assert list(made._noted) == [key_of(2)]
    node.core.get_end(node.core.get_start(node.partition("a"), [key_of(2)], node.tick()))
    assert not made._noted


def test_strict_reservations_keep_no_account() -> None:
    core = Node(16, make_policy(1, {"a": (4, 16)}), reservations=Reservations.STRICT).core
    assert core._pool.tenants[TENANT].account is None
