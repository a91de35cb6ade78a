"""Exports to an object store: whole objects, written once; interrupted at any moment they go on without a gap."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest

from saltern.audit.cursor import CursorFile
from saltern.audit.exporting import Page
from saltern.audit.formats import TEXT_FORMATS
from saltern.audit.lines import encode_events
from saltern.audit.object_export import ObjectExport
from saltern.errors import AlreadyExistsError
from saltern.objects import ObjectFolder
from tests.support.audit_chains import chain_of, exported
from tests.support.object_store import s3_server

EVENTS = [exported(event) for event in chain_of(23)]


def pages(after: int = 0, until: int = 23) -> Iterator[Page]:
    for first in range(after, until, 4):
        events = EVENTS[first : min(first + 4, until)]
        yield Page(encode_events(events), len(events), events[-1].sequence)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectFolder]:
    with s3_server(monkeypatch) as url:
        yield ObjectFolder(f"{url}/trail")


def export(folder: ObjectFolder, cursor: Path | None, format_name: str = "jsonl", until: int = 23) -> int:
    cursor_file = None if cursor is None else CursorFile(cursor)
    made = ObjectExport("acme", format_name, folder=folder, cursor_file=cursor_file, object_events=8)
    for page in pages(made.after_sequence, until):
        made.write(page)
    made.finish()
    return made.events


def contents(folder: ObjectFolder, suffix: str = "jsonl") -> list[bytes]:
    names = [name for page in folder.names() for name in page if name.endswith(suffix)]
    return [folder.read(name) or b"" for name in names]


@pytest.mark.parametrize("format_name", ["jsonl", "csv", "ocsf"])
def test_objects_in_the_order_of_their_names_are_the_export(
    folder: ObjectFolder, tmp_path: Path, format_name: str
) -> None:
    assert export(folder, tmp_path / "cursor", format_name) == 23
    header, encode = TEXT_FORMATS[format_name].header, TEXT_FORMATS[format_name].encode

    found = contents(folder, format_name)
    assert len(found) == 3 and all(content.startswith(header) for content in found)
    assert b"".join(content.removeprefix(header) for content in found) == encode(encode_events(EVENTS))


def test_parquet_objects_are_whole_files(folder: ObjectFolder, tmp_path: Path) -> None:
    export(folder, tmp_path / "cursor", "parquet")
    sequences: list[int] = []
    for content in contents(folder, "parquet"):
        sequences += pyarrow.parquet.read_table(io.BytesIO(content))["sequence"].to_pylist()
    assert sequences == list(range(1, 24))


@pytest.mark.parametrize("stage", ["before the put", "between put and cursor", "after the cursor"])
def test_i7_a_crash_at_any_moment_neither_loses_nor_repeats(folder: ObjectFolder, tmp_path: Path, stage: str) -> None:
    cursor = tmp_path / "cursor"
    export(folder, cursor, until=8)
    kept = cursor.read_bytes()
    if stage != "before the put":
        export(folder, cursor, until=16)
    if stage == "between put and cursor":
        cursor.write_bytes(kept)

    export(folder, cursor)

    assert b"".join(contents(folder)) == encode_events(EVENTS)


def test_nothing_is_overwritten_and_another_folder_goes_on_with_the_same_cursor(
    folder: ObjectFolder, tmp_path: Path
) -> None:
    export(folder, tmp_path / "cursor", until=10)
    with pytest.raises(AlreadyExistsError):
        export(folder, None)
    with pytest.raises(AlreadyExistsError):
        export(folder, tmp_path / "another")
    assert export(folder, tmp_path / "csv", "csv") == 23, "another format is another export"

    next_folder = ObjectFolder(f"{folder.url}/next")
    assert export(next_folder, tmp_path / "cursor") == 13
