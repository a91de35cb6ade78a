"""Offline proof: each way of changing a trail or its checkpoints is found, and the first bad event is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from saltern.audit.chain import ChainedRecord, ChainHead, append, genesis
from saltern.audit.checkpoints import (
    NO_DIGEST,
    Checkpoint,
    decode_checkpoint,
    encode_checkpoint,
    key_id_of,
    sign_checkpoint,
)
from saltern.audit.lines import encode_event
from saltern.audit.public_keys import CheckpointPublicKey, decode_public_keys, encode_public_keys
from saltern.audit.verification import FindingKind, Remembered, Report, Verifier
from saltern.errors import DataLossError, InvalidArgumentError
from tests.support.audit_chains import RECORD, START_US, STEP_US, chain_of, exported

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEYS = {key_id_of(PRIVATE.public_key()): CheckpointPublicKey(PRIVATE.public_key())}
EVENTS = list(chain_of(12))
SIGNED_AT = (4, 9)


def lines_of(events: Iterable[ChainedRecord], chain: str = "acme") -> list[bytes]:
    return [encode_event(exported(event, chain)) + b"\n" for event in events]


def checkpoints_of(
    events: list[ChainedRecord], at: Iterable[int] = SIGNED_AT, key: Ed25519PrivateKey = PRIVATE
) -> list[bytes]:
    lines, previous = [], NO_DIGEST
    for sequence in at:
        head = ChainHead(sequence, events[sequence - 1].hash)
        checkpoint = sign_checkpoint(key, "acme", head, time_us=sequence, previous=previous)
        previous = checkpoint.digest
        lines.append(encode_checkpoint(checkpoint))
    return lines


LINES, CHECKPOINTS = lines_of(EVENTS), checkpoints_of(EVENTS)


def verify(
    lines: list[bytes], checkpoints: list[bytes] = CHECKPOINTS, *, remembered: Remembered | None = None,
    from_sequence: int = 1, unsigned_span_max_us: int = 10**9,
) -> Report:  # fmt: skip
    verifier = Verifier(
        "acme", KEYS, from_sequence=from_sequence, remembered=remembered, unsigned_span_max_us=unsigned_span_max_us
    )
    verifier.read_checkpoints(checkpoints)
    verifier.read_events(lines)
    return verifier.finish()


def rewritten(events: list[ChainedRecord], from_sequence: int, actor: str = "apiKeys/nobody") -> list[ChainedRecord]:
    """The chain as somebody makes it who knows how hashes are made: every link fits."""
    made = events[: from_sequence - 1]
    for event in events[from_sequence - 1 :]:
        head = ChainHead(made[-1].sequence, made[-1].hash) if made else genesis("acme")
        made.append(append("acme", head, replace(event.record, actor=actor)))
    return made


def test_i11_an_untouched_trail_is_intact() -> None:
    report = verify(LINES)

    assert report.is_intact and report.first_bad_sequence is None
    assert (report.events, report.first_sequence, report.last.sequence) == (12, 1, 12)
    assert (report.checkpoints, report.signed_sequence) == (2, 9)


INSERTED = append("acme", ChainHead(5, EVENTS[4].hash), replace(RECORD, actor="apiKeys/nobody"))
EDITED = replace(EVENTS[5], record=replace(EVENTS[5].record, outcome="denied"))

DIGITS = EVENTS[5].hash.hex().encode()
ATTACKS: dict[str, tuple[list[bytes], FindingKind, int]] = {
    "an edit": (lines_of([*EVENTS[:5], EDITED, *EVENTS[6:]]), FindingKind.EDITED, 6),
    "an edit with its hash made anew": (
        lines_of([*EVENTS[:5], INSERTED, *EVENTS[6:]]), FindingKind.UNLINKED, 7,
    ),
    "a deletion": (LINES[:5] + LINES[6:], FindingKind.MISSING, 7),
    "a deletion at the beginning": (LINES[1:], FindingKind.MISSING, 2),
    "an insertion": (lines_of([*EVENTS[:5], INSERTED, *EVENTS[5:]]), FindingKind.OUT_OF_ORDER, 6),
    "a repetition": (LINES[:6] + LINES[5:], FindingKind.OUT_OF_ORDER, 6),
    "a reorder": ([*LINES[:5], LINES[6], LINES[5], *LINES[7:]], FindingKind.OUT_OF_ORDER, 6),
    "a truncation": (LINES[:7], FindingKind.TRUNCATED, 8),
    "nothing left": ([], FindingKind.TRUNCATED, 1),
    "a whole chain made anew": (lines_of(rewritten(EVENTS, 1)), FindingKind.REWRITTEN, 4),
    "a tail made anew": (lines_of(rewritten(EVENTS, 6)), FindingKind.REWRITTEN, 9),
    "a line that is no event": ([*LINES[:5], b"{}\n", *LINES[6:]], FindingKind.MALFORMED, 6),
    "a line cut off": ([*LINES[:11], LINES[11][:40]], FindingKind.MALFORMED, 12),
    "a thing said twice": (
        [*LINES[:5], LINES[5].replace(b'{"actor":', b'{"actor":"apiKeys/nobody","actor":'), *LINES[6:]],
        FindingKind.MALFORMED, 6,
    ),
    "more than an event says": (
        [*LINES[:5], LINES[5].replace(b'{"actor":', b'{"a":1,"actor":'), *LINES[6:]], FindingKind.MALFORMED, 6,
    ),
    "digits in another case": (
        [*LINES[:5], LINES[5].replace(DIGITS, DIGITS.upper()), *LINES[6:]],
        FindingKind.MALFORMED, 6,
    ),
    "the same time elsewhere": (
        [*LINES[:5], LINES[5].replace(b':05Z"', b':05+00:00"'), *LINES[6:]], FindingKind.MALFORMED, 6,
    ),
    "a time nowhere": ([*LINES[:5], LINES[5].replace(b':05Z"', b':05"'), *LINES[6:]], FindingKind.MALFORMED, 6),
    "an event of another chain": (
        [*LINES[:5], *lines_of([EVENTS[5]], "globex"), *LINES[6:]], FindingKind.OTHER_CHAIN, 6,
    ),
    "another chain's events under this name": (
        lines_of(list(chain_of(12, "globex"))), FindingKind.UNLINKED, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_i11_each_attack_on_the_events_is_found_where_it_is(attack: str) -> None:
    lines, kind, sequence = ATTACKS[attack]

    report = verify(lines)

    assert kind in {finding.kind for finding in report.findings}
    assert report.first_bad_sequence == sequence
    assert min(finding.sequence for finding in report.findings if finding.kind is kind) == sequence


def line_with(line: bytes, change: Callable[[Checkpoint], Checkpoint]) -> bytes:
    return encode_checkpoint(change(decode_checkpoint(line)))


OTHER_PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
LONGER = checkpoints_of(EVENTS, (2, 4, 9))


def moved(one: Checkpoint) -> Checkpoint:
    return Checkpoint(one.chain, ChainHead(7, EVENTS[6].hash), one.time_us, one.previous, one.key_id, one.signature)


CHECKPOINT_ATTACKS: dict[str, tuple[list[bytes], FindingKind]] = {
    "signed by another key": (checkpoints_of(EVENTS, key=OTHER_PRIVATE), FindingKind.CHECKPOINT_FORGED),
    "altered": ([CHECKPOINTS[0], line_with(CHECKPOINTS[1], moved)], FindingKind.CHECKPOINT_FORGED),
    "one taken out of the middle": ([LONGER[0], LONGER[2]], FindingKind.CHECKPOINT_MISSING),
    "in another order": ([LONGER[1], LONGER[0]], FindingKind.CHECKPOINT_MISSING),
    "one twice": ([LONGER[0], LONGER[0]], FindingKind.CHECKPOINT_MISSING),
    "all of them": ([], FindingKind.UNSIGNED),
}


@pytest.mark.parametrize("attack", CHECKPOINT_ATTACKS)
def test_i11_each_attack_on_the_checkpoints_is_found(attack: str) -> None:
    checkpoints, kind = CHECKPOINT_ATTACKS[attack]

    assert kind in {finding.kind for finding in verify(LINES, checkpoints).findings}


def test_i11_trail_and_checkpoints_rolled_back_together_are_found_by_whoever_has_looked_before() -> None:
    remembered = verify(LINES).remember()
    assert remembered is not None
    assert verify(LINES, remembered=remembered).is_intact

    back = verify(LINES[:6], CHECKPOINTS[:1], remembered=remembered)
    assert [finding.kind for finding in back.findings] == [FindingKind.ROLLED_BACK]
    anew = rewritten(EVENTS, 6)
    forked = verify(lines_of(anew), checkpoints_of(anew), remembered=remembered)
    assert [finding.kind for finding in forked.findings] == [FindingKind.ROLLED_BACK]


def test_i11_checkpoints_rolled_back_alone_leave_more_unsigned_than_the_service_ever_does() -> None:
    report = verify(LINES, CHECKPOINTS[:1], unsigned_span_max_us=5_000_000)

    assert [(finding.kind, finding.sequence) for finding in report.findings] == [(FindingKind.UNSIGNED, 5)]
    assert verify(LINES, CHECKPOINTS, unsigned_span_max_us=5_000_000).is_intact


def test_an_export_of_a_part_verifies_when_it_is_said_where_it_begins() -> None:
    assert verify(LINES[5:], from_sequence=6).is_intact
    assert verify(LINES[4:], from_sequence=5).is_intact, "the checkpoint of event 4 is what it continues"
    assert verify(LINES[5:]).first_bad_sequence == 6
    assert verify(LINES[6:], from_sequence=6).first_bad_sequence == 7
    other = lines_of(rewritten(EVENTS, 3))
    assert verify(other[4:], from_sequence=5).first_bad_sequence == 5
    assert verify(other[5:], from_sequence=6).first_bad_sequence == 9


def test_a_line_of_checkpoints_that_a_crash_cut_off_is_counted_and_no_fault() -> None:
    report = verify(LINES, [CHECKPOINTS[0], CHECKPOINTS[1][:30] + b"\n", b"\n", CHECKPOINTS[1]])

    assert report.is_intact and report.unreadable_checkpoints == 1


def test_two_writers_have_two_folders() -> None:
    verifier = Verifier("acme", KEYS)
    verifier.read_checkpoints(CHECKPOINTS)
    verifier.read_checkpoints(checkpoints_of(EVENTS, (3, 11)))
    verifier.read_events(LINES)
    report = verifier.finish()

    assert report.is_intact and report.signed_sequence == 11


def test_many_findings_are_counted_and_the_first_are_kept() -> None:
    report = verify(lines_of(list(chain_of(300, "globex")), "globex"))

    assert report.count > 300 and len(report.findings) == 100


@given(st.data())
def test_i11_any_flipped_bit_of_events_or_checkpoints_is_found(data: st.DataObject) -> None:
    target = data.draw(st.sampled_from(["events", "checkpoints"]))
    lines, checkpoints = list(LINES), list(CHECKPOINTS)
    chosen = lines if target == "events" else checkpoints
    index = data.draw(st.integers(0, len(chosen) - 1))
    at = data.draw(st.integers(0, len(chosen[index]) - 2))
    flipped = bytearray(chosen[index])
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    chosen[index] = bytes(flipped)

    report = verify(lines, checkpoints)

    # Hexadecimal digits may be written in either case; a last checkpoint that is no line any more is as if not written.
    same = decoded(checkpoints) == decoded(CHECKPOINTS)
    assert not report.is_intact or report.unreadable_checkpoints or (target == "checkpoints" and same)


def decoded(lines: list[bytes]) -> list[Checkpoint] | None:
    try:
        return [decode_checkpoint(line) for line in lines]
    except DataLossError:
        return None


def test_the_bytes_that_are_signed_are_frozen() -> None:
    """Checkpoints of years must verify forever."""
    assert (
        decode_checkpoint(CHECKPOINTS[1]).digest.hex()
        == "160581eda38035a28cfaa9aac7b9f8f74f4f53c3ab7875e980365efdabf476e8"
    )
    assert list(KEYS) == ["2a117ec85c52e9ce"]


ROTATED_US = START_US + 6 * STEP_US  # after event 7, which is of that moment
ROTATED = {
    public.id: public
    for public in (
        CheckpointPublicKey(PRIVATE.public_key(), from_us=START_US, until_us=ROTATED_US),
        CheckpointPublicKey(OTHER_PRIVATE.public_key(), from_us=ROTATED_US),
    )
}
LATER_US = ROTATED_US + 3600 * 1_000_000


def signed(*signatures: tuple[int, Ed25519PrivateKey, int], events: list[ChainedRecord] = EVENTS) -> list[bytes]:
    """Checkpoints of sequence, key and time."""
    lines, previous = [], NO_DIGEST
    for sequence, key, time_us in signatures:
        head = ChainHead(sequence, events[sequence - 1].hash)
        checkpoint = sign_checkpoint(key, "acme", head, time_us=time_us, previous=previous)
        previous = checkpoint.digest
        lines.append(encode_checkpoint(checkpoint))
    return lines


def verify_rotated(checkpoints: list[bytes], events: list[ChainedRecord] = EVENTS, now_us: int = LATER_US) -> Report:
    verifier = Verifier("acme", ROTATED, unsigned_span_max_us=10**9, now_us=now_us)
    verifier.read_checkpoints(checkpoints)
    verifier.read_events(lines_of(events))
    return verifier.finish()


def test_i11_checkpoints_of_a_rotation_verify_old_and_new_ones_and_the_same_event_signed_anew() -> None:
    report = verify_rotated(
        signed(
            (4, PRIVATE, ROTATED_US - 1), (7, PRIVATE, ROTATED_US),
            (7, OTHER_PRIVATE, ROTATED_US + 1), (12, OTHER_PRIVATE, LATER_US),
        )
    )  # fmt: skip
    assert report.is_intact and report.signed_sequence == 12 and report.checkpoints == 4


def test_i11_a_stolen_old_key_signs_nothing_newer() -> None:
    honest = [(4, PRIVATE, ROTATED_US - 1), (4, OTHER_PRIVATE, ROTATED_US + 1)]
    forged = rewritten(EVENTS, 5)
    minute_us = 60 * 1_000_000
    late = signed(*honest, (9, PRIVATE, ROTATED_US + minute_us + 1), events=forged)
    # What was signed honestly is thrown away, and what takes its place says that it is from before the rotation.
    backdated = signed((4, PRIVATE, ROTATED_US - 1), (12, PRIVATE, ROTATED_US - 1), events=forged)

    assert [f.kind for f in verify_rotated(late, forged).findings] == [FindingKind.KEY_RETIRED]
    assert FindingKind.KEY_RETIRED in [f.kind for f in verify_rotated(backdated, forged).findings]
    # In the minutes after a rotation not every chain has been signed anew yet.
    assert verify_rotated(signed((4, PRIVATE, ROTATED_US - 1)), EVENTS[:4], now_us=ROTATED_US + 1).is_intact


def test_i11_an_old_key_does_not_vouch_for_events_of_after_its_time() -> None:
    far = [replace(event.record, event_time_us=LATER_US) for event in EVENTS[4:]]
    events = EVENTS[:4]
    for record in far:
        events = [*events, append("acme", ChainHead(events[-1].sequence, events[-1].hash), record)]
    report = verify_rotated(signed((12, PRIVATE, ROTATED_US), (12, OTHER_PRIVATE, LATER_US), events=events), events)

    assert [(f.kind, f.sequence) for f in report.findings] == [(FindingKind.KEY_RETIRED, 12)]


def test_a_new_key_vouches_for_nothing_of_before_its_time() -> None:
    early = signed((4, OTHER_PRIVATE, ROTATED_US - 3600 * 1_000_000))
    assert FindingKind.KEY_RETIRED in [f.kind for f in verify_rotated(early).findings]


def test_public_keys_go_through_pem_with_the_time_in_which_they_sign() -> None:
    pem = encode_public_keys(ROTATED.values())

    assert decode_public_keys(pem) == ROTATED
    bare = "".join(line + "\n" for line in pem.splitlines() if not line.startswith(("Audit", "Signs")))
    assert {key_id: key.until_us for key_id, key in decode_public_keys(bare).items()} == dict.fromkeys(ROTATED)
    for wrong in (
        "", "hello", pem.replace("MCow", "MCox"), "-----BEGIN PUBLIC KEY-----\n-----END PUBLIC KEY-----\n",
        pem.replace("Signs until: 2", "Signs until: x"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError):
            decode_public_keys(wrong)
