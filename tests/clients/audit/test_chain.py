from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from saltern.audit.chain import (
    AuditRecord,
    ChainedRecord,
    ChainFault,
    ChainHead,
    EventHash,
    FaultKind,
    append,
    append_many,
    canonical_bytes,
    event_hash,
    genesis,
    verify,
    whole_number,
)
from saltern.errors import InvalidArgumentError
from saltern.keys import frame

RECORD = AuditRecord(
    event_time_us=1,
    actor="apiKeys/a",
    actor_role="platform-admin",
    peer="192.0.2.7:50412",
    method="M",
    resource="tenants/acme",
    outcome="success",
    reason="",
    request_id="",
    policy_version=7,
    before=None,
    after={"b": 1, "a": ["ü", True, None]},
)
HASH = EventHash(bytes(range(32)))
RECORD_OF_FORMAT_1 = replace(RECORD, actor_role="", peer="", policy_version=0)


def chain_of(length: int, chain: str = "acme") -> list[ChainedRecord]:
    events: list[ChainedRecord] = []
    head = genesis(chain)
    for number in range(length):
        event = append(chain, head, replace(RECORD, event_time_us=number))
        head = ChainHead(event.sequence, event.hash)
        events.append(event)
    return events


def test_many_events_in_a_row_are_those_of_one_after_the_other() -> None:
    records = [replace(RECORD, event_time_us=number) for number in range(5)]
    events = list(append_many("acme", genesis("acme"), records))
    assert events == chain_of(5)
    assert [event.hash for event in events] == [
        event_hash("acme", event.sequence, event.previous_hash, event.record) for event in events
    ]
    assert list(append_many("acme", head_of(events[:2]), records[2:])) == events[2:]
    assert list(append_many("acme", genesis("acme"), [])) == []


def head_of(events: Sequence[ChainedRecord]) -> ChainHead:
    return ChainHead(events[-1].sequence, events[-1].hash)


def kinds(faults: list[ChainFault]) -> set[FaultKind]:
    return {fault.kind for fault in faults}


def test_the_canonical_forms_are_frozen() -> None:
    """Stored chains must verify forever: a change of a form needs a new number."""
    assert canonical_bytes(RECORD_OF_FORMAT_1, 1).decode() == (
        '{"actor":"apiKeys/a","after":{"a":["ü",true,null],"b":1},"before":null,"event_time_us":1,"method":"M",'
        '"outcome":"success","reason":"","request_id":"","resource":"tenants/acme"}'
    )
    assert canonical_bytes(RECORD).decode() == (
        '{"actor":"apiKeys/a","actor_role":"platform-admin","after":{"a":["ü",true,null],"b":1},"before":null,'
        '"event_time_us":1,"method":"M","outcome":"success","peer":"192.0.2.7:50412","policy_version":7,"reason":"",'
        '"request_id":"","resource":"tenants/acme"}'
    )
    start = genesis("acme")
    assert start.hash.hex() == "198c1ea1bac217c4f36d16c90064e7dc4db3257aa3b069f946d97b45d76afa79"
    assert (
        event_hash("acme", 1, start.hash, RECORD_OF_FORMAT_1, 1).hex()
        == "8fb000349e28674d5194b10213cd3aa45f3b1474bf8fcda8ad2701eaebe1f76d"
    )
    assert (
        append("acme", start, RECORD).hash.hex() == "d15dc6cb9b7c5331c0cedf3899a9dc67ce6a69318a7c600ad2e3568aeeeceb42"
    )


def test_a_chain_goes_from_one_format_to_the_next() -> None:
    start = genesis("acme")
    first_hash = event_hash("acme", 1, start.hash, RECORD_OF_FORMAT_1, 1)
    first = ChainedRecord(1, RECORD_OF_FORMAT_1, start.hash, first_hash, 1)
    second = append("acme", ChainHead(1, first_hash), RECORD)

    assert verify("acme", [first, second]) == []
    # Nobody can write into an old event what its hash does not cover, nor pass one format off as another.
    assert verify("acme", [replace(first, record=RECORD)]) == [ChainFault(1, FaultKind.EDITED)]
    assert verify("acme", [replace(first, hash_format=2)]) == [ChainFault(1, FaultKind.EDITED)]
    assert verify("acme", [replace(first, hash_format=3)]) == [ChainFault(1, FaultKind.EDITED)]


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


def test_integers_read_back_as_doubles_are_integers() -> None:
    assert whole_number(3.0) == 3
    for fraction in (0.5, float("inf"), float("nan"), 2.0**54):
        with pytest.raises(ValueError, match="integers only"):
            whole_number(fraction)


def test_values_of_different_types_have_different_forms() -> None:
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
        append("acme", genesis("acme"), replace(RECORD, after={"value": value}))


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


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), JSON, max_size=3))
def test_the_form_is_that_of_any_other_json_writer(value: dict[str, object]) -> None:
    """Whoever writes a verifier of their own finds it in their standard library."""
    record = replace(RECORD, after=value)
    plain = json.dumps(asdict(record), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    assert canonical_bytes(record) == plain.encode()
    assert (
        event_hash("c", 5, HASH, record)
        == hashlib.sha256(frame("saltern/audit/2", "c", 5, HASH, plain.encode())).digest()
    )


@given(st.data())
def test_any_change_of_one_hash_is_found(data: st.DataObject) -> None:
    events = chain_of(4)
    at = data.draw(st.integers(0, 3))
    bit = data.draw(st.integers(0, 255))
    flipped = bytearray(events[at].hash)
    flipped[bit // 8] ^= 1 << bit % 8
    events[at] = replace(events[at], hash=EventHash(bytes(flipped)))

    assert verify("acme", events) != []
