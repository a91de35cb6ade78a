from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.audit_chain import (
    AuditRecord,
    ChainedRecord,
    ChainFault,
    ChainHead,
    EventHash,
    FaultKind,
    append,
    canonical_bytes,
    genesis,
    verify,
)
from saltern.errors import InvalidArgumentError

RECORD = AuditRecord(1, "apiKeys/a", "M", "tenants/acme", "success", "", "", None, {"b": 1, "a": ["ü", True, None]})


def chain_of(length: int, chain: str = "acme") -> list[ChainedRecord]:
    events: list[ChainedRecord] = []
    head = genesis(chain)
    for number in range(length):
        event = append(chain, head, replace(RECORD, event_time_us=number))
        head = ChainHead(event.sequence, event.hash)
        events.append(event)
    return events


def head_of(events: Sequence[ChainedRecord]) -> ChainHead:
    return ChainHead(events[-1].sequence, events[-1].hash)


def kinds(faults: list[ChainFault]) -> set[FaultKind]:
    return {fault.kind for fault in faults}


def test_the_canonical_form_is_frozen() -> None:
    """Stored chains must verify forever: a change of this form needs a new label."""
    assert canonical_bytes(RECORD).decode() == (
        '{"actor":"apiKeys/a","after":{"a":["ü",true,null],"b":1},"before":null,"event_time_us":1,"method":"M",'
        '"outcome":"success","reason":"","request_id":"","resource":"tenants/acme"}'
    )
    assert genesis("acme").hash.hex() == "198c1ea1bac217c4f36d16c90064e7dc4db3257aa3b069f946d97b45d76afa79"
    assert (
        append("acme", genesis("acme"), RECORD).hash.hex()
        == "8fb000349e28674d5194b10213cd3aa45f3b1474bf8fcda8ad2701eaebe1f76d"
    )


def test_an_untouched_chain_has_no_fault() -> None:
    events = chain_of(5)

    assert verify("acme", events, head=head_of(events)) == []
    assert verify("acme", events[2:], start=head_of(events[:2])) == []
    assert verify("acme", []) == []


def test_an_edit_is_found() -> None:
    events = chain_of(5)
    events[2] = replace(events[2], record=replace(events[2].record, actor="apiKeys/nobody"))

    assert verify("acme", events) == [ChainFault(3, FaultKind.EDITED)]


def test_an_edit_with_its_hash_made_anew_breaks_the_link_after_it() -> None:
    events = chain_of(5)
    edited = replace(events[2].record, actor="apiKeys/nobody")
    events[2] = append("acme", head_of(events[:2]), edited)

    assert verify("acme", events) == [ChainFault(4, FaultKind.UNLINKED)]


def test_a_deletion_is_found() -> None:
    events = chain_of(5)

    assert verify("acme", events[:2] + events[3:]) == [ChainFault(4, FaultKind.MISSING)]
    assert verify("acme", events[1:]) == [ChainFault(2, FaultKind.MISSING)]


def test_a_reorder_is_found() -> None:
    events = chain_of(5)
    events[1], events[2] = events[2], events[1]

    assert FaultKind.OUT_OF_ORDER in kinds(verify("acme", events))


def test_a_duplicate_is_found() -> None:
    events = chain_of(3)

    assert verify("acme", [*events, events[-1]]) == [ChainFault(3, FaultKind.OUT_OF_ORDER)]


def test_a_truncation_and_a_full_rewrite_are_found_against_a_head_kept_elsewhere() -> None:
    events = chain_of(5)

    assert verify("acme", events[:4], head=head_of(events)) == [ChainFault(4, FaultKind.TRUNCATED)]
    rewritten = [append("acme", genesis("acme"), replace(RECORD, actor="apiKeys/nobody"))]
    assert verify("acme", rewritten) == []
    assert kinds(verify("acme", rewritten, head=head_of(events))) == {FaultKind.TRUNCATED}


def test_an_event_fits_no_other_chain() -> None:
    events = chain_of(2, "acme")

    assert kinds(verify("other", events)) == {FaultKind.UNLINKED, FaultKind.EDITED}


def test_integers_read_back_as_doubles_have_the_same_form() -> None:
    as_double = replace(RECORD, after={"b": 1.0, "a": ["ü", True, None]})

    assert canonical_bytes(as_double) == canonical_bytes(RECORD)
    assert canonical_bytes(replace(RECORD, after={"b": True})) != canonical_bytes(replace(RECORD, after={"b": 1}))
    assert canonical_bytes(replace(RECORD, after={"b": "1"})) != canonical_bytes(replace(RECORD, after={"b": 1}))


NESTED: dict[str, object] = {}
for _ in range(20):
    NESTED = {"n": NESTED}


@pytest.mark.parametrize(
    "value", [0.5, float("nan"), float("inf"), 2**53 + 1, b"bytes", {1: "a"}, "\ud800", {"a": object()}, NESTED]
)
def test_what_has_no_canonical_form_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgumentError):
        canonical_bytes(replace(RECORD, after={"value": value}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), JSON, max_size=3))
def test_the_order_of_names_does_not_matter(value: dict[str, object]) -> None:
    backwards = dict(reversed(value.items()))

    assert canonical_bytes(replace(RECORD, after=value)) == canonical_bytes(replace(RECORD, after=backwards))


@given(st.data())
def test_any_change_of_one_hash_is_found(data: st.DataObject) -> None:
    events = chain_of(4)
    at = data.draw(st.integers(0, 3))
    bit = data.draw(st.integers(0, 255))
    flipped = bytearray(events[at].hash)
    flipped[bit // 8] ^= 1 << bit % 8
    events[at] = replace(events[at], hash=EventHash(bytes(flipped)))

    assert verify("acme", events) != []
