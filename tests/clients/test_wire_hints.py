"""Whoever is refused by the wire protocol is told what to do, whatever was wrong."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from saltern import wire
from saltern.errors import ProtocolError

KEY = bytes(wire.KEY_BYTES)
keys = st.sampled_from([b"", b"short", KEY, KEY * 2, KEY * 4097])
sizes = st.lists(st.integers(-1, wire.ENTRY_MAX_BYTES + 1), max_size=3)
offsets = st.lists(st.integers(-1, 5), max_size=3)
regions = st.none() | st.integers(0, 1)


def hinted(check: object, *arguments: object) -> None:
    try:
        check(*arguments)  # type: ignore[operator]
    except ProtocolError as error:
        assert error.message and error.hint


@settings(deadline=None)  # a busy machine is no fault
@given(keys, sizes, st.binary(max_size=24), regions, offsets, st.integers(0, 100))
def test_every_refused_put_has_a_hint(
    keys: bytes, sizes: list[int], sums: bytes, region: int | None, offsets: list[int], payload_bytes: int
) -> None:
    hinted(wire.check_put, wire.Put(keys, sizes, sums, region, offsets), payload_bytes)


@settings(deadline=None)
@given(keys, sizes, regions, offsets, st.integers(0, 1))
def test_every_refused_get_has_a_hint(
    keys: bytes, sizes: list[int], region: int | None, offsets: list[int], payload_bytes: int
) -> None:
    hinted(wire.check_get, wire.Get(keys, sizes, region, offsets), payload_bytes)


@settings(deadline=None)
@given(keys | st.binary(max_size=70))
def test_every_refused_list_of_keys_has_a_hint(keys: bytes) -> None:
    hinted(wire.split_keys, keys)


@settings(deadline=None)
@given(st.binary(max_size=40) | st.binary(min_size=wire.HEADER_BYTES, max_size=wire.HEADER_BYTES))
def test_every_refused_header_has_a_hint(data: bytes) -> None:
    hinted(wire.decode_header, data)
