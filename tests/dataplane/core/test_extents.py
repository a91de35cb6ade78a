from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.extents import GRANULE_BYTES, ArenaOffset, Extents, round_up
from saltern.errors import InternalError

G = GRANULE_BYTES


def allocated(extents: Extents, granules: int) -> ArenaOffset:
    offset = extents.allocate(granules * G)
    assert offset is not None
    return offset


def test_an_entry_occupies_whole_granules() -> None:
    assert [round_up(size) for size in (1, G - 1, G, G + 1, 3 * G)] == [G, G, G, 2 * G, 3 * G]


def test_capacity_is_rounded_down_and_all_of_it_can_be_allocated() -> None:
    extents = Extents(3 * G + 17)
    assert extents.capacity_bytes == 3 * G
    assert extents.allocate(3 * G) == 0
    assert extents.free_bytes == extents.largest_free_bytes == 0
    assert extents.allocate(G) is None


def test_an_arena_without_a_granule_holds_nothing() -> None:
    extents = Extents(G - 1)
    extents.check_invariants()
    assert extents.allocate(G) is None


def test_the_smallest_extent_that_is_large_enough_is_taken() -> None:
    extents = Extents(20 * G)
    offsets = [allocated(extents, size) for size in (5, 1, 3, 1, 4, 1, 5)]
    for position, size in ((0, 5), (2, 3), (4, 4)):
        extents.free(offsets[position], size * G)
    assert extents.allocate(3 * G) == offsets[2]
    assert extents.allocate(2 * G) == offsets[4]
    extents.check_invariants()


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_freed_neighbours_coalesce_in_any_order(order: tuple[int, ...]) -> None:
    extents = Extents(6 * G)
    offsets = [allocated(extents, 2) for _ in range(3)]
    for position in order:
        extents.free(offsets[position], 2 * G)
        extents.check_invariants()
    assert extents.free_extents() == [(0, 6 * G)]


@pytest.mark.parametrize(("start", "size"), [(0, G), (-G, G), (4 * G, G), (3 * G, 2 * G), (G, 0), (G, -G)])
def test_freeing_what_is_free_or_outside_is_an_internal_error(start: int, size: int) -> None:
    extents = Extents(4 * G)
    assert extents.allocate(2 * G) == 0
    extents.free(ArenaOffset(0), 2 * G)
    with pytest.raises(InternalError):
        extents.free(ArenaOffset(start), size)
    extents.check_invariants()


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9)), max_size=60), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_any_sequence_keeps_extents_disjoint_and_loses_no_byte(
    commands: list[tuple[int, int]], capacity_granules: int
) -> None:
    extents = Extents(capacity_granules * G)
    live: list[tuple[ArenaOffset, int]] = []
    for choice, granules in commands:
        if choice < 5:
            largest_bytes = extents.largest_free_bytes
            offset = extents.allocate(granules * G)
            assert (offset is not None) == (granules * G <= largest_bytes), "it fails only where nothing fits"
            if offset is not None:
                live.append((offset, granules * G))
        elif live:
            extents.free(*live.pop(choice % len(live)))
        extents.check_invariants()
        end = 0
        for start, length in sorted([*live, *extents.free_extents()]):
            assert start == end
            end = start + length
        assert end == extents.capacity_bytes


@given(st.lists(st.integers(1, 5), min_size=1, max_size=16), st.data())
@settings(max_examples=150, deadline=None)
def test_a_trial_predicts_what_freeing_would_make_and_changes_nothing(sizes: list[int], data: st.DataObject) -> None:
    extents = Extents(sum(sizes) * G)
    pieces = [(allocated(extents, size), size * G) for size in sizes]
    order = data.draw(st.permutations(range(len(sizes))))
    already_free = data.draw(st.integers(0, len(sizes) - 1))
    for position in order[:already_free]:
        extents.free(*pieces[position])
    before = extents.free_extents()

    trial = extents.trial()
    predicted = [trial.add(*pieces[position]) for position in order[already_free:]]
    assert extents.free_extents() == before

    for position, (start, end) in zip(order[already_free:], predicted, strict=True):
        extents.free(*pieces[position])
        assert (start, end - start) in extents.free_extents()


def test_mixed_sizes_do_not_lose_capacity() -> None:
    """4 KiB to 64 MiB side by side; when all is freed the arena is one piece again."""
    rng = random.Random(7)
    extents = Extents(1 << 30)
    live: list[tuple[ArenaOffset, int]] = []
    for _ in range(5_000):
        size = round_up(int(2 ** rng.uniform(12, 26)))
        offset = extents.allocate(size)
        while offset is None:
            extents.free(*live.pop(rng.randrange(len(live))))
            offset = extents.allocate(size)
        live.append((offset, size))
    extents.check_invariants()
    for extent in live:
        extents.free(*extent)
    assert extents.free_extents() == [(0, 1 << 30)]


def test_exactly_this_extent_is_taken() -> None:
    extents = Extents(10 * G)
    extents.take(ArenaOffset(0), G)
    extents.take(ArenaOffset(3 * G), 2 * G)
    extents.take(ArenaOffset(8 * G), 2 * G)
    extents.take(ArenaOffset(2 * G), G)
    extents.check_invariants()
    assert extents.free_extents() == [(G, G), (5 * G, 3 * G)]
    assert extents.free_bytes == 4 * G


@pytest.mark.parametrize(
    ("start", "size"), [(G, G), (2 * G, 3 * G), (4 * G, 5 * G), (-G, G), (7 * G, 2 * G), (2 * G, 0), (2 * G + 1, G)]
)
def test_taking_what_is_not_all_free_is_an_internal_error_and_changes_nothing(start: int, size: int) -> None:
    extents = Extents(8 * G)
    extents.take(ArenaOffset(G), G)
    extents.take(ArenaOffset(4 * G), G)
    with pytest.raises(InternalError):
        extents.take(ArenaOffset(start), size)
    extents.check_invariants()
    assert extents.free_extents() == [(0, G), (2 * G, 2 * G), (5 * G, 3 * G)]
