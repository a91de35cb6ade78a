"""``saltern audit verify``: proof, offline, that a trail is whole and unchanged."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import chain as joined
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import click

from saltern.cli.failure import EXIT_NOT_VERIFIED, EXIT_OK, one_line, say
from saltern.cli.parameters import TENANT
from saltern.cli.render import print_json
from saltern.cli.settings import Command, settings_of
from saltern.cli.times import TIME
from saltern.errors import InvalidArgumentError, NotFoundError
from saltern.names import TenantId

if TYPE_CHECKING:
    from saltern.audit.verification import Remembered, Report

_PATH: Final = click.Path(path_type=Path)
_SHOWN_FINDINGS: Final = 20


@click.command("verify", cls=Command)
@click.argument("exports", metavar="EXPORT...", nargs=-1, required=True)
@click.option(
    "--checkpoints", "checkpoint_places", multiple=True, required=True, metavar="FOLDER|FILE|s3://BUCKET/FOLDER",
    help="Where the control plane keeps checkpoints; once for each control plane that has a folder of its own.",
)  # fmt: skip
@click.option(
    "--public-key", "key_path", type=_PATH, required=True, metavar="FILE", help="What `audit public-key` printed."
)
@click.option("--tenant", "tenant_id", type=TENANT, help="The chain must be this tenant's.")
@click.option("--platform", is_flag=True, help="The chain must be the platform's.")
@click.option(
    "--from-sequence", type=click.IntRange(1), default=1, show_default=True,
    help="Where the export is meant to begin, if not with the first event.",
)  # fmt: skip
@click.option(
    "--remember", "memory_path", type=_PATH, metavar="FILE",
    help="Keep here what was verified last, and notice when trail and checkpoints are both rolled back behind it.",
)  # fmt: skip
@click.option("--as-of", type=TIME, help="When the checkpoints were copied, for those of an archive. [default: now]")
@click.pass_context
def verify(
    ctx: click.Context, *, exports: tuple[str, ...], checkpoint_places: tuple[str, ...], key_path: Path,
    tenant_id: TenantId | None, platform: bool, from_sequence: int, memory_path: Path | None, as_of: datetime | None,
) -> int:  # fmt: skip
    """Verify exports (jsonl, in order; - for standard input) against signed checkpoints, without any server.

    Finds an event that was changed, taken out, put in or moved, an end that was cut off, a whole chain made anew, and
    checkpoints that were forged, rolled back or signed with a key that had retired; names the first bad event.
    Exit code 0: intact, 8: not.

    \b
    saltern audit verify acme.jsonl --checkpoints /mnt/worm/audit --public-key audit.pem --remember acme.seen
    """
    from saltern.audit.lines import PLATFORM_CHAIN, decode_event
    from saltern.audit.public_keys import decode_public_keys
    from saltern.audit.verification import Verifier

    if platform and tenant_id:
        raise click.UsageError("--tenant and --platform exclude each other")
    keys = decode_public_keys(_read(key_path).decode("ascii", "replace"))
    with ExitStack() as stack:
        lines: Iterator[bytes] = joined.from_iterable(_open(name, stack) for name in exports)
        chain: str | None = tenant_id or (PLATFORM_CHAIN if platform else None)
        if chain is None:
            first = next(lines, None)
            if first is None:
                raise click.UsageError("the export is empty: say with --tenant or --platform whose it is")
            chain, lines = decode_event(first.removesuffix(b"\n")).chain, joined([first], lines)
        verifier = Verifier(
            chain,
            keys,
            from_sequence=from_sequence,
            remembered=_load_memory(memory_path, chain),
            now_us=round((as_of or datetime.now(UTC)).timestamp() * 1_000_000),
        )
        for place in checkpoint_places:
            verifier.read_checkpoints(_checkpoint_lines(place, chain))
        verifier.read_events(lines)
    report = verifier.finish()
    if settings_of(ctx).json:
        print_json(_as_json(report))
    else:
        _print(report)
    if not report.is_intact:
        return EXIT_NOT_VERIFIED
    if memory_path is not None:
        _save_memory(memory_path, report)
    return EXIT_OK


def _print(report: Report) -> None:
    stretch = f"events {report.first_sequence} to {report.last.sequence}" if report.events else "no events"
    say(f"chain        {report.chain}")
    say(f"read         {stretch} ({report.events}), {report.checkpoints} checkpoints")
    say(f"signed       up to event {report.signed_sequence}")
    if report.unreadable_checkpoints:
        say(f"passed over  {report.unreadable_checkpoints} lines that are no checkpoints")
    if report.is_intact:
        say("intact       every event is as it was written")
        return
    say(f"NOT INTACT   {report.count} findings, the first at event {report.first_bad_sequence}")
    for finding in report.findings[:_SHOWN_FINDINGS]:
        say(f"  {finding.kind.value}: {one_line(finding.detail)}")
    if report.count > _SHOWN_FINDINGS:
        say(f"  and {report.count - _SHOWN_FINDINGS} more")


def _as_json(report: Report) -> dict[str, object]:
    return {
        "chain": report.chain,
        "intact": report.is_intact,
        "events": report.events,
        "firstSequence": report.first_sequence,
        "lastSequence": report.last.sequence,
        "signedSequence": report.signed_sequence,
        "checkpoints": report.checkpoints,
        "unreadableCheckpoints": report.unreadable_checkpoints,
        "firstBadSequence": report.first_bad_sequence,
        "findingsCount": report.count,
        "findings": [
            {"kind": finding.kind.value, "sequence": finding.sequence, "detail": finding.detail}
            for finding in report.findings
        ],
    }


def _open(name: str, stack: ExitStack) -> BinaryIO:
    if name == "-":
        return sys.stdin.buffer
    try:
        return stack.enter_context(Path(name).open("rb"))
    except OSError as error:
        raise _unreadable(Path(name), error) from None


def _checkpoint_lines(place: str, chain: str) -> Iterator[bytes]:
    """The lines of a file, of a chain's folder, or of the folder that holds it, here or in an object store."""
    from saltern.objects import ObjectFolder, is_object_url

    if is_object_url(place):
        folder_of_objects = ObjectFolder(place)
        for names in folder_of_objects.names(f"{chain}/"):
            for name in names:
                yield from (folder_of_objects.read(name) or b"").splitlines()
        return
    path = Path(place)
    if path.is_dir():
        folder = path / chain if (path / chain).is_dir() else path
        for file in sorted(folder.glob("*.jsonl")):
            yield from _read(file).splitlines()
    else:
        yield from _read(path).splitlines()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def _load_memory(path: Path | None, chain: str) -> Remembered | None:
    import msgspec

    from saltern.audit.verification import Remembered

    if path is None or not path.exists():
        return None
    try:
        remembered = msgspec.json.decode(_read(path), type=Remembered)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        remembered = None
    if remembered is None or remembered.chain != chain:
        raise InvalidArgumentError(
            f"{str(path)!r} does not hold what a verification of the chain {chain} remembers",
            reason="INVALID_MEMORY",
            hint="keep one file for each chain; if this one was damaged, find out by whom before you remove it",
        )
    return remembered


def _save_memory(path: Path, report: Report) -> None:
    import msgspec

    remembered = report.remember()
    if remembered is None:
        return
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(msgspec.json.encode(remembered) + b"\n")
        partial.replace(path)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot write {str(path)!r}: {error.strerror or error}", reason="FILE_NOT_WRITABLE"
        ) from None


def _unreadable(path: Path, error: OSError) -> NotFoundError:
    return NotFoundError(
        f"cannot read {str(path)!r}: {error.strerror or error}",
        reason="FILE_NOT_READABLE",
        hint="check the path, and whose file it is",
    )
