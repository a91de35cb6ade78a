"""Checkpoints in an object store: written once, whoever writes; a store that is away is noticed and made up for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from structlog.testing import capture_logs

from controlplane.audit.checkpoints import CheckpointWriter
from controlplane.audit.object_sink import ObjectSink
from saltern.audit.chain import ChainHead, EventHash
from saltern.audit.checkpoints import NO_DIGEST, Checkpoint, sign_checkpoint
from saltern.errors import InvalidArgumentError, SalternError
from saltern.objects import ObjectFolder
from tests.controlplane.audit.test_checkpoints import World, fixed_key, world  # noqa: F401 (a fixture)
from tests.support.object_store import SECRET, s3_server

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_server(monkeypatch) as url:
        yield f"{url}/checkpoints"


def checkpoint(sequence: int, before: Checkpoint | None) -> Checkpoint:
    head = ChainHead(sequence, EventHash(bytes(32)))
    previous = NO_DIGEST if before is None else before.digest
    return sign_checkpoint(PRIVATE, "acme", head, time_us=sequence, previous=previous)


def test_i11_of_two_writers_one_gets_the_next_number_and_nothing_is_ever_replaced(bucket: str) -> None:
    one, other = ObjectSink(ObjectFolder(bucket)), ObjectSink(ObjectFolder(bucket))
    assert one.last("acme") is None and other.last("acme") is None
    first, late = checkpoint(1, None), checkpoint(2, None)

    assert one.append(first)
    assert not other.append(late)
    assert other.last("acme") == first
    second = checkpoint(2, first)
    assert other.append(second) and not one.append(second)
    assert one.last("acme") == second
    names = [name for page in ObjectFolder(bucket).names("acme/") for name in page]
    assert names == ["acme/000000000001.jsonl", "acme/000000000002.jsonl"]


def test_the_newest_of_very_many_is_found_in_few_steps(tmp_path: Path) -> None:
    folder = ObjectFolder(f"file://{tmp_path}")
    (tmp_path / "acme").mkdir()
    for number in range(1, 5322):
        (tmp_path / "acme" / f"{number:012}.jsonl").write_bytes(b"")
    sink = ObjectSink(folder)
    assert sink._newest_number("acme") == 5321
    assert sink._newest_number("acme") == 5321
    assert sink._newest_number("acm") == 0


async def test_i11_a_writer_signs_into_it_and_a_new_process_goes_on(world: World, bucket: str) -> None:  # noqa: F811
    await world.act("acme", 3)
    writer = CheckpointWriter(world.database, fixed_key, ObjectSink(ObjectFolder(bucket)), world.clock)
    (first,) = await writer.sign_moved()
    await world.act("acme")
    other = CheckpointWriter(world.database, fixed_key, ObjectSink(ObjectFolder(bucket)), world.clock)
    (second,) = await other.sign_moved()

    assert second.previous == first.digest
    assert await writer.sign_moved() == []


async def test_a_store_that_is_away_is_told_without_the_credentials_and_made_up_for(
    world: World,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await world.act("acme")
    with s3_server(monkeypatch) as url:
        writer = CheckpointWriter(world.database, fixed_key, ObjectSink(ObjectFolder(url)), world.clock)
    with capture_logs() as logs:
        await writer.try_sign()
    assert [log["reason"] for log in logs] == ["OBJECT_STORE_UNAVAILABLE"]
    assert SECRET not in str(logs) and "testing" not in str(logs)
    assert (writer.failure, writer.failures) == ("OBJECT_STORE_UNAVAILABLE", 1)


def test_what_cannot_be_written_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(monkeypatch) as url, pytest.raises(SalternError) as caught:
        ObjectSink(ObjectFolder(f"{url}-that-is-not-there/x"))
    assert caught.value.reason == "OBJECT_STORE_UNAVAILABLE" and SECRET not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/x", "s3://bucket/x?token=1", "/folder", "ftp://host/x"])
def test_a_url_with_credentials_or_of_another_kind_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ObjectFolder(url)
    assert caught.value.reason == "INVALID_OBJECT_URL" and "secret@" not in str(caught.value)


def test_what_somebody_else_puts_beside_checkpoints_stops_none(tmp_path: Path) -> None:
    sink = ObjectSink(ObjectFolder(f"file://{tmp_path}"))
    first = checkpoint(1, None)
    assert sink.append(first)
    for name in ("zzz.jsonl", "000000000002.jsonl.bak", "notes.txt", "00000000000x.jsonl", "1.jsonl"):
        (tmp_path / "acme" / name).write_bytes(b"{}")
    assert sink.last("acme") == first
    assert sink.append(checkpoint(2, first))
