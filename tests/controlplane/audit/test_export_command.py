"""``saltern audit export`` and ``verify`` as processes of their own against a real control plane."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from controlplane.audit.stretches import PAGE_EVENTS
from saltern.audit.formats import TEXT_FORMATS
from saltern.audit.lines import encode_event
from saltern.cli.failure import EXIT_NOT_VERIFIED
from tests.support.audit_chains import chain_of, exported, store
from tests.support.control import Control, control_plane, migrate

EVENTS = 30 * PAGE_EVENTS
KILLS = 3


@dataclass
class Command:
    """The command line against one control plane."""

    control: Control
    folder: Path

    async def start(self, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
        environment = {
            "PATH": os.environ["PATH"],
            "SALTERN_CONTROL": str(self.control.plane.endpoint),
            "SALTERN_API_KEY": self.control.admin_key,
        }
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "saltern", "audit", *arguments, cwd=self.folder, env=environment,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, **options,
        )  # fmt: skip

    async def run(self, *arguments: str, code: int = 0) -> tuple[bytes, str]:
        process = await self.start(*arguments)
        out, err = await process.communicate()
        assert process.returncode == code, err.decode()
        return out, err.decode()

    async def export(self, *arguments: str, code: int = 0) -> str:
        return (await self.run("export", "--tenant", "acme", *arguments, code=code))[1]

    def bytes_of(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


@pytest.fixture
async def command(control: Control, tmp_path: Path) -> Command:
    folder = tmp_path / "work"
    folder.mkdir()
    return Command(control, folder)


def whole(count: int, form: str = "jsonl", start: int = 0) -> bytes:
    lines = b"".join(encode_event(exported(event)) + b"\n" for event in list(chain_of(count))[start:])
    return TEXT_FORMATS[form].header + TEXT_FORMATS[form].encode(lines)


async def test_i11_an_export_killed_again_and_again_is_the_same_as_one_that_was_not(command: Command) -> None:
    store(command.control.owner_url, chain_of(EVENTS))
    output, cursor = command.folder / "a.csv", command.folder / "cursor"
    arguments = ("export", "--tenant", "acme", "--format", "csv", "--output", "a.csv", "--cursor", "cursor")
    for _ in range(KILLS):
        reached = output.stat().st_size if output.exists() else 0
        process = await command.start(*arguments)
        ended = asyncio.ensure_future(process.wait())
        # Kill it as soon as it has written something past where it was: mostly in the middle of a page.
        while not ended.done() and (not output.exists() or output.stat().st_size in (0, reached)):
            await asyncio.wait({ended}, timeout=0.01)
        assert not ended.done(), "it had time to end"
        process.send_signal(signal.SIGKILL)
        await ended
        await process.communicate()
    unfinished = output.read_bytes()
    assert len(unfinished) < len(whole(EVENTS, "csv")) and cursor.exists()

    await command.export("--format", "csv", "--output", "a.csv", "--cursor", "cursor")

    assert command.bytes_of("a.csv") == whole(EVENTS, "csv")


@pytest.mark.parametrize("form", ["jsonl", "csv", "ocsf"])
async def test_an_export_goes_on_with_what_came_since(command: Command, form: str) -> None:
    chain = list(chain_of(5))
    store(command.control.owner_url, iter(chain[:3]))
    options = ("--format", form, "--cursor", "cursor")
    await command.export(*options, "--output", "a")
    assert command.bytes_of("a") == whole(3, form)
    store(command.control.owner_url, iter(chain[3:]))

    assert "2 events" in await command.export(*options, "--output", "a")
    assert command.bytes_of("a") == whole(5, form)
    assert "0 events" in await command.export(*options, "--output", "b")
    assert command.bytes_of("b") == TEXT_FORMATS[form].header, "another file begins behind the first"


async def test_what_a_cursor_does_not_speak_of_is_not_overwritten(command: Command) -> None:
    store(command.control.owner_url, chain_of(3))
    (command.folder / "a").write_text("mine")
    for options in ((), ("--cursor", "cursor"), ("--format", "parquet")):
        assert "not overwritten" in await command.export("--output", "a", *options, code=5)
    assert command.bytes_of("a") == b"mine"

    await command.export("--output", "b", "--cursor", "cursor")
    other = ("--output", "c", "--cursor", "cursor", "--format", "csv")
    assert "is of the chain acme as jsonl" in await command.export(*other, code=5)
    (command.folder / "b").write_bytes(b"short")
    assert "speaks of" in await command.export("--output", "b", "--cursor", "cursor", code=1)
    (command.folder / "cursor").write_text("nonsense")
    assert "damaged" in await command.export("--output", "b", "--cursor", "cursor", code=1)
    assert "cannot write" in await command.export("--output", "nowhere/b", code=2)


async def test_follow_prints_what_comes_and_ends_when_interrupted(command: Command) -> None:
    chain = list(chain_of(4))
    store(command.control.owner_url, iter(chain[:2]))
    process = await command.start("export", "--tenant", "acme", "--follow", "--cursor", "cursor")
    assert process.stdout is not None
    lines = [await process.stdout.readline() for _ in range(2)]
    store(command.control.owner_url, iter(chain[2:]))
    lines += [await process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    rest, _ = await process.communicate()

    assert b"".join(lines) == whole(4) and rest == b"" and process.returncode == 130
    assert json.loads(command.bytes_of("cursor"))["after_sequence"] == 4
    out, _ = await command.run("export", "--tenant", "acme", "--cursor", "cursor")
    assert out == b"", "standard output goes on behind the cursor too"


async def test_parquet_is_a_file_for_each_run(command: Command) -> None:
    import pyarrow.parquet

    chain = list(chain_of(5))
    store(command.control.owner_url, iter(chain[:3]))
    options = ("--format", "parquet", "--cursor", "cursor", "--output")
    await command.export(*options, "a.parquet")
    assert "not overwritten" in await command.export(*options, "a.parquet", code=5)
    store(command.control.owner_url, iter(chain[3:]))
    await command.export(*options, "b.parquet")
    await command.export(*options, "c.parquet")

    tables = [pyarrow.parquet.read_table(command.folder / name) for name in ("a.parquet", "b.parquet")]
    assert [table["sequence"].to_pylist() for table in tables] == [[1, 2, 3], [4, 5]]
    assert sorted(path.name for path in command.folder.iterdir()) == ["a.parquet", "b.parquet", "cursor"]
    # As after a crash between the file and its cursor: it is made again, not refused.
    pending = {
        **json.loads(command.bytes_of("cursor")),
        "after_sequence": 3,
        "pending": str(command.folder / "b.parquet"),
    }
    (command.folder / "cursor").write_text(json.dumps(pending))
    await command.export(*options, "b.parquet")
    assert pyarrow.parquet.read_table(command.folder / "b.parquet")["sequence"].to_pylist() == [4, 5]


@pytest.fixture
async def trail(postgres: Any, tmp_path: Path) -> AsyncIterator[Command]:
    """A trail of real acts, exported and signed by a control plane that has ended; only files are left."""
    folder = tmp_path / "work"
    folder.mkdir()
    with postgres.fresh_database(migrate) as urls:
        async with control_plane(urls, tmp_path) as control:
            await control.redeem()
            await control.add_tenant("acme", "a", "b", limit_bytes=1 << 20)
            command = Command(control, folder)
            await command.export("--output", "acme.jsonl")
            pem, _ = await command.run("public-key")
            (folder / "audit.pem").write_bytes(pem)
        yield command


def verification(trail: Command, *arguments: str) -> tuple[str, ...]:
    checkpoints = str(trail.control.state_dir / "audit-checkpoints")
    return ("verify", *arguments, "--checkpoints", checkpoints, "--public-key", "audit.pem", "--remember", "seen")


async def test_i11_a_trail_verifies_with_nothing_but_files(trail: Command) -> None:
    out, _ = await trail.run(*verification(trail, "acme.jsonl"))
    assert b"intact" in out and b"NOT INTACT" not in out
    out, _ = await trail.run(*verification(trail, "acme.jsonl", "--output", "json"))
    report = json.loads(out)
    assert report["intact"] and report["events"] == report["signedSequence"] == 4

    lines = trail.bytes_of("acme.jsonl").splitlines(keepends=True)
    edited = lines[1].replace(b"bootstrap-admin", b"somebody-else")
    (trail.folder / "bad.jsonl").write_bytes(b"".join([lines[0], edited, *lines[2:]]))
    (trail.folder / "less.jsonl").write_bytes(b"".join([*lines[:2], lines[3]]))
    (trail.folder / "short.jsonl").write_bytes(lines[0])
    for name, first_bad in (("bad.jsonl", 2), ("less.jsonl", 4), ("short.jsonl", 2)):
        out, _ = await trail.run(*verification(trail, name, "--output", "json"), code=EXIT_NOT_VERIFIED)
        assert json.loads(out)["firstBadSequence"] == first_bad, name
    out, _ = await trail.run(*verification(trail, "short.jsonl"), code=EXIT_NOT_VERIFIED)
    assert b"the first at event 2" in out
    # In two files, one after the other, it is whole again.
    (trail.folder / "rest.jsonl").write_bytes(b"".join(lines[1:]))
    await trail.run(*verification(trail, "short.jsonl", "rest.jsonl"))


async def test_i11_a_database_owner_who_writes_the_whole_chain_anew_is_found(postgres: Any, tmp_path: Path) -> None:
    """Whoever owns the database can make a chain in which every link fits; not the signature over it."""
    folder = tmp_path / "work"
    folder.mkdir()
    with postgres.fresh_database(migrate) as urls:
        async with control_plane(urls, tmp_path) as control:
            admin_key = await control.redeem()
            await control.add_tenant("acme", "a", "b")
            pem, _ = await Command(control, folder).run("public-key")
        (folder / "audit.pem").write_bytes(pem)
        url = urls.owner.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url) as connection:
            connection.execute("ALTER TABLE audit_events DISABLE TRIGGER ALL")
            connection.execute("SELECT set_config('saltern.tenant', '*', true)")
            # As long as the true one, so that nothing but what was signed tells them apart.
            events = connection.execute("DELETE FROM audit_events WHERE chain = 'acme'").rowcount
        store(urls.owner, chain_of(events))
        async with control_plane(urls, tmp_path) as control:
            control.admin_key = admin_key
            await Command(control, folder).export("--output", "acme.jsonl")
    assert (folder / "acme.jsonl").read_bytes() == whole(events)
    trail = Command(control, folder)

    out, _ = await trail.run(*verification(trail, "acme.jsonl", "--output", "json"), code=EXIT_NOT_VERIFIED)

    report = json.loads(out)
    assert (report["checkpoints"], report["signedSequence"]) == (1, 0)
    assert [(one["kind"], one["sequence"]) for one in report["findings"]] == [("rewritten", events)]
