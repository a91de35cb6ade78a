"""What to read where and what to write where, from what nodes were seen to hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from saltern.chain_plan import Sighting, Source, copies_wanted, plan_reads, plan_writes, prefix_length
from saltern.placement import ReadLoad

A, B, OLD_A = Source("a", 2), Source("b", 2), Source("a", 1)
LENGTH = 6
rows = st.binary(min_size=LENGTH, max_size=LENGTH).map(lambda data: bytes(byte & 1 for byte in data))


def sighting(**held: str) -> Sighting:
    """``a="110000"``: what the source holds, position by position."""
    sources = {"a": A, "b": B, "old_a": OLD_A}
    seen = Sighting(LENGTH)
    seen.found = {sources[name]: bytearray(int(bit) for bit in bits) for name, bits in held.items()}
    return seen


def test_the_prefix_is_what_the_nodes_have_together() -> None:
    assert sighting(a="110000", b="001000").prefix == 3
    assert sighting(a="011111").prefix == 0
    assert sighting(a="111000", old_a="000111").prefix == 6
    assert Sighting(LENGTH).prefix == 0
    assert (prefix_length(b""), prefix_length(b"\1\1"), prefix_length(b"\0")) == (0, 2, 0)


def test_reads_prefer_the_newest_epoch_and_then_the_lighter_node() -> None:
    load = ReadLoad()
    load.note("a", 100)
    seen = sighting(a="110000", b="011000", old_a="111100")
    assert plan_reads(seen, range(LENGTH), load) == {A: [0], B: [1, 2], OLD_A: [3]}
    load.note("b", 1000)
    assert plan_reads(seen, range(LENGTH), load) == {A: [0, 1], B: [2], OLD_A: [3]}


@given(a=rows, b=rows, old=rows, wanted=st.sets(st.integers(0, LENGTH - 1)))
def test_every_block_that_is_anywhere_is_read_once(a: bytes, b: bytes, old: bytes, wanted: set[int]) -> None:
    seen = Sighting(LENGTH)
    seen.found = {A: bytearray(a), B: bytearray(b), OLD_A: bytearray(old)}
    reads = plan_reads(seen, sorted(wanted), ReadLoad())
    planned = [position for positions in reads.values() for position in positions]
    assert sorted(planned) == [position for position in sorted(wanted) if a[position] or b[position] or old[position]]
    assert all(seen.found[source][position] for source, positions in reads.items() for position in positions)


def test_a_new_chain_is_written_once_and_one_that_was_found_again_twice() -> None:
    seen = sighting(a="110000", b="000000")
    assert plan_writes(seen, range(2, LENGTH), 2, ["a", "b"], twice=False) == {"a": [2, 3, 4, 5]}
    assert plan_writes(seen, range(LENGTH), 2, ["a", "b"], twice=False) == {"a": [2, 3, 4, 5]}
    assert plan_writes(seen, range(LENGTH), 2, ["a", "b"], twice=True) == {"a": [2, 3, 4, 5], "b": [0, 1, 2, 3, 4, 5]}
    # Where only the second answers, it takes what is new.
    assert plan_writes(seen, range(LENGTH), 2, ["b"], twice=False) == {"b": [0, 1, 2, 3, 4, 5]}
    assert plan_writes(seen, range(LENGTH), 2, [], twice=True) == {}


def test_wanted_copies_are_those_of_one_node_one_that_is_emptied_or_an_epoch_that_ends() -> None:
    assert copies_wanted(sighting(a="111000", b="100000"), 2, ["a", "b"], twice=True) == (1, 2)
    assert copies_wanted(sighting(a="111000", b="100000"), 2, ["a", "b"], twice=False) == ()
    assert copies_wanted(sighting(a="111000", b="100000"), 2, ["b"], twice=False) == (1, 2)
    assert copies_wanted(sighting(a="100000", b="100000", old_a="111000"), 2, ["a", "b"], twice=False) == (1, 2)
    # Behind the gap nothing can be read, so there is nothing to copy.
    assert copies_wanted(sighting(a="101111", b="000000"), 2, ["a", "b"], twice=True) == (0,)


@given(a=rows, b=rows, twice=st.booleans())
def test_writes_never_repeat_what_a_node_has_and_never_exceed_two_copies(a: bytes, b: bytes, twice: bool) -> None:
    seen = Sighting(LENGTH)
    seen.found = {A: bytearray(a), B: bytearray(b)}
    writes = plan_writes(seen, range(LENGTH), 2, ["a", "b"], twice=twice)
    for node_id, positions in writes.items():
        row = {"a": a, "b": b}[node_id]
        assert not any(row[position] for position in positions)
    for position in range(LENGTH):
        copies = a[position] + b[position] + sum(position in positions for positions in writes.values())
        assert copies == 2 if twice else copies == max(1, a[position] + b[position])
