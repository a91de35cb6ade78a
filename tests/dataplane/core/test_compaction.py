"""Entries are moved for a put that finds bytes but no run: contents travel along, nobody loses, work is bounded."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core import compaction
from dataplane.core import pool as pool_module
from dataplane.core.compaction import MOVED_FACTOR, MOVED_MAX_BYTES, Looks, Move
from dataplane.core.entry import Entry, Pin, PutRefused, PutTicket
from dataplane.core.extents import GRANULE_BYTES as G
from dataplane.core.pool import Pool
from dataplane.io.arena import Arena
from saltern.errors import InternalError
from saltern.names import TenantId
from tests.support.cache_node import Node, Quota, key_of, make_policy, reason_of


class Contents(Node):
    """A node with one byte of memory for each granule: an entry's granules all hold its key number."""

    def __init__(self, capacity_granules: int, quotas: dict[str, Quota]) -> None:
        super().__init__(capacity_granules, make_policy(1, quotas, block_granules=16_384))
        self.memory = bytearray(capacity_granules)
        self.moves: list[Move] = []
        self.core.on_relocate(self.relocate)

    def relocate(self, moves: Sequence[Move]) -> None:
        for source, target, size_bytes in moves:
            granules = -(-size_bytes // G)
            self.memory[target // G : target // G + granules] = self.memory[source // G : source // G + granules]
        self.moves += moves

    def start(self, tenant: str, number: int, granules: int = 1, epoch: int = 1) -> PutTicket | PutRefused:
        self.moves.clear()
        evictions = self.evictions()
        outcome = self.core.put_start(self.partition(tenant, epoch), key_of(number), granules * G, self.tick())
        if isinstance(outcome, PutRefused):
            assert not self.moves and self.evictions() == evictions, "I6: refused, and something was done for it"
        else:
            place = outcome.offset // G
            self.memory[place : place + granules] = bytes([number % 256]) * granules
        moved_bytes = sum(move.size_bytes for move in self.moves)
        assert moved_bytes <= min(MOVED_FACTOR * granules * G, MOVED_MAX_BYTES), "a put moved more than it may"
        return outcome

    def check(self) -> None:
        """Every entry's memory holds its own bytes (I2, I7)."""
        self.core.check_invariants()
        for entry in self.core._pool.entries():
            place, granules = entry.offset // G, entry.extent_bytes // G
            expected = bytes([int.from_bytes(entry.key, "big") % 256]) * granules
            assert self.memory[place : place + granules] == expected, "I7: bytes did not travel with their entry"


def spread(node: Contents, tenant: str, filler: str, entries: int, gap: int) -> None:
    """Entries of one granule of ``tenant`` with ``gap`` free granules after each."""
    for number in range(entries):
        assert node.put(tenant, number) is None
        assert node.put(filler, 10_000 + number, gap) is None
    node.core.delete(node.partition(filler), [key_of(10_000 + number) for number in range(entries)])


def test_i5_spread_entries_keep_nobody_from_a_long_run() -> None:
    """8 protected granules leave no run longer than 7; a put of 32 within its reservation finds 56 bytes free."""
    node = Contents(64, {"quiet": (8, 64), "large": (40, 64)})
    spread(node, "quiet", "large", 8, 7)
    assert node.core.usage().largest_free_bytes == 7 * G
    assert node.put("large", 99, 32) is None
    assert node.there("quiet", range(8)) == list(range(8)) and node.evictions() == 0
    usage = node.core.usage()
    assert usage.compactions == 1 and usage.moved_bytes == len(node.moves) * G > 0
    node.check()


def test_without_anybody_to_copy_bytes_nothing_is_moved() -> None:
    node = Node(64, make_policy(1, {"quiet": (8, 64), "large": (40, 64)}))
    spread(node, "quiet", "large", 8, 7)  # type: ignore[arg-type]
    assert reason_of(node.start("large", 99, 32)) == "NODE_FULL"


def test_i7_what_is_read_or_written_is_never_moved() -> None:
    """Held entries every 8 granules bound the region: 16 granules are refused, and nothing is moved or evicted."""
    node = Contents(64, {"quiet": (8, 64), "large": (40, 64)})
    spread(node, "quiet", "large", 8, 7)
    partition = node.partition("quiet")
    pins = node.core.get_start(partition, [key_of(number) for number in range(8)], node.tick())
    places = [pin.offset for pin in pins if pin is not None]
    assert len(places) == 8 and reason_of(node.start("large", 99, 16)) == "NODE_FULL"
    node.core.get_end(pins[2:5])
    assert node.put("large", 99, 16) is None, "three neighbours in a row are free to go"
    assert [pin.offset for pin in node.core.get_start(partition, [key_of(0)], node.tick()) if pin] == places[:1]
    node.check()


def test_an_entry_that_fits_no_hole_is_pushed_aside() -> None:
    node = Contents(24, {"a": (24, 24)})
    for number, granules in enumerate((6, 8, 6, 4)):
        assert node.put("a", number, granules) is None
    node.core.delete(node.partition("a"), [key_of(0), key_of(2)])
    pins = node.core.get_start(node.partition("a"), [key_of(3)], node.tick())
    assert node.put("a", 9, 12) is None
    assert node.moves == [Move(6 * G, 0, 8 * G)] and node.there("a", range(10)) == [1, 3, 9]
    node.core.get_end(pins)
    node.check()


def test_blocks_of_one_length_are_never_mapped() -> None:
    node = Contents(16, {"a": (0, 16)})
    for number in range(200):
        assert node.put("a", number, 2) is None
    layout = node.core._pool.layout
    assert layout is not None and not layout.is_mixed and node.core.usage().compactions == 0


def test_what_a_put_looks_at_is_bounded_by_its_length() -> None:
    looked: list[int] = []
    real = compaction.plan_room

    def watched(*arguments: Any, extent_bytes: int, looks: Looks) -> Any:
        plan = real(*arguments, extent_bytes=extent_bytes, looks=looks)
        looked.append(looks.left)
        return plan

    node = Contents(4096, {"quiet": (2048, 4096), "large": (2048, 4096)})
    with patch("dataplane.core.victims.plan_room", watched):
        spread(node, "quiet", "large", 256, 15)
        node.start("large", 99_999, 4)
        node.start("large", 99_998, 1024)
    assert looked and min(looked) > -64, "no more than one step past the bound"


@pytest.mark.parametrize("seed", range(6))
def test_i5_large_puts_within_a_reservation_always_find_room(seed: int) -> None:
    """Eight tenants with half of the arena reserved, entries of 1 to 64 granules: what is promised in bytes is had."""
    rng = random.Random(seed)
    names = [f"t{number}" for number in range(8)]
    node = Contents(2048, dict.fromkeys(names, (128, 2048)))
    for number in range(1500):
        assert node.put(rng.choice(names), number, int(2 ** rng.uniform(0, 6))) is None
    for step, name in enumerate(names):
        for number in range(2):
            assert node.put(name, 5_000 + 10 * step + number, 64) is None, "I5: refused within the reservation"
    assert node.core.usage().compactions > 0
    node.check()


@pytest.mark.parametrize("seed", range(3))
def test_nearly_all_that_budgets_allow_can_be_had_in_large_entries(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"t{number}" for number in range(8)]
    node = Contents(4096, dict.fromkeys(names, (256, 4096)))
    for number in range(1500):
        node.put(rng.choice(names), number, int(2 ** rng.uniform(0, 6)))
    most = 0
    for number in range(96):
        assert node.put("t0", 5_000 + number, 64) is None
        most = max(most, node.used("t0") // 64)
    others = sum(node.used(name) for name in names[1:])
    assert most >= 0.95 * ((4096 - others) // 64) - 1
    node.check()


commands = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "begin", "end", "read", "release", "delete"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 60),
        st.sampled_from([1, 1, 2, 3, 5, 8, 13]),
    ),
    max_size=80,
)


def drive(node: Contents, wanted: list[tuple[str, str, int, int]]) -> None:
    tickets: list[PutTicket] = []
    pins: list[Pin] = []
    held: dict[int, Entry] = {}
    for command, tenant, number, granules in wanted:
        partition = node.partition(tenant)
        if command in ("put", "begin"):
            outcome = node.start(tenant, number, granules)
            if isinstance(outcome, PutTicket):
                if command == "put":
                    node.core.put_commit(outcome, number, node.tick())
                else:
                    tickets.append(outcome)
        elif command == "end" and tickets:
            node.core.put_commit(tickets.pop(number % len(tickets)), number, node.tick())
        elif command == "read":
            pins += [pin for pin in node.core.get_start(partition, [key_of(number)], node.tick()) if pin is not None]
        elif command == "release" and pins:
            node.core.get_end([pins.pop(number % len(pins))])
        elif command == "delete":
            node.core.delete(partition, [key_of(number)])
        node.check()
        held = {pin.offset: pin.entry for pin in pins} | {ticket.offset: ticket.entry for ticket in tickets}
        assert all(entry.offset == offset for offset, entry in held.items()), "I7: a held entry was moved"


@settings(max_examples=60, deadline=None)
@given(commands)
def test_i7_contents_travel_with_their_entries(wanted: list[tuple[str, str, int, int]]) -> None:
    node = Contents(40, {"a": (12, 40), "b": (12, 30), "c": (0, 40)})
    for number in range(6):
        node.put("a", 100 + number)
        node.put("c", 110 + number, 4)
    drive(node, wanted)


def random_commands(seeds: int) -> Iterator[list[tuple[str, str, int, int]]]:
    for seed in range(seeds):
        rng = random.Random(seed)
        kinds = ["put", "put", "put", "put", "read", "release", "delete", "begin", "end"]
        yield [
            (rng.choice(kinds), rng.choice("abc"), rng.randrange(60), rng.choice([1, 1, 2, 3, 5, 8, 13]))
            for _ in range(300)
        ]


@pytest.mark.parametrize("fault", ["held entries move", "copies in the wrong order", "an entry forgets where it is"])
def test_a_planted_fault_is_found(fault: str) -> None:
    def backwards(self: Contents, moves: Sequence[Move]) -> None:
        real(self, moves[::-1])

    real, move = Contents.relocate, Pool._move

    def forget(self: Pool, moves: list[tuple[Entry, int]]) -> None:
        before = moves[0][0].offset
        move(self, moves)
        moves[0][0].offset = before

    plants: dict[str, Any] = {
        "held entries move": patch.object(compaction, "_is_movable", lambda entry: True),
        "copies in the wrong order": patch.object(Contents, "relocate", backwards),
        "an entry forgets where it is": patch.object(pool_module.Pool, "_move", forget),
    }
    with plants[fault], pytest.raises((AssertionError, KeyError, InternalError)):
        for wanted in random_commands(200):
            drive(Contents(40, {"a": (12, 40), "b": (12, 30), "c": (0, 40)}), wanted)


def test_the_arena_copies_overlapping_moves_as_a_whole() -> None:
    arena = Arena(1 << 20)
    arena.view(4096, 3000)[:] = bytes(number % 251 for number in range(3000))
    expected = bytes(arena.view(4096, 3000))
    arena.relocate([Move(4096, 4000, 3000), Move(4000, 4500, 3000), Move(4500, 100_000, 3000)])
    assert bytes(arena.view(100_000, 3000)) == bytes(arena.view(4500, 3000)) == expected
    arena.close()


def test_counters_say_who_moved_nothing() -> None:
    node = Contents(8, {"a": (0, 8)})
    node.fill("a", range(20))
    usage = node.core.usage([TenantId("a")])
    assert (usage.compactions, usage.moved_bytes) == (0, 0)
