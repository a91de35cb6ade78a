"""``saltern audit export``: an audit trail for a SIEM, a warehouse, or a verification."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from saltern.cli.failure import say
from saltern.cli.parameters import TENANT
from saltern.cli.settings import Command, GlobalOption
from saltern.cli.stack import connect
from saltern.cli.times import TIME
from saltern.errors import InvalidArgumentError, SalternError, UnavailableError
from saltern.names import TenantId, tenant_name

if TYPE_CHECKING:
    from saltern.admin_client import AdminClient
    from saltern.audit.exporting import Page

_FORMATS: Final = ("jsonl", "csv", "ocsf", "parquet")
_FOLLOW_EVERY_S: Final = 1.0
_STDOUT: Final = "-"


class _ExportCommand(Command):
    """Its --output is a file, not the form of what is printed."""

    def __init__(self, name: str | None = None, **attributes: Any) -> None:
        super().__init__(name, **attributes)
        self.params = [
            option for option in self.params if not (isinstance(option, GlobalOption) and option.name == "output")
        ]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What is asked for: the chain, and between which times."""

    parent: str
    since: datetime | None
    until: datetime | None


@click.command("export", cls=_ExportCommand)
@click.option("--tenant", "tenant_id", type=TENANT, help="This tenant's chain.")
@click.option("--platform", is_flag=True, help="The platform's own chain (platform-admin).")
@click.option(
    "--format", "format_name", type=click.Choice(_FORMATS), default="jsonl", show_default=True,
    help="jsonl verifies; csv is safe in spreadsheets; ocsf is API Activity of OCSF 1.7.0; parquet needs pyarrow.",
)  # fmt: skip
@click.option(
    "--output", default=_STDOUT, metavar="FILE|-|s3://BUCKET/FOLDER", show_default=True,
    help="Where to; a file must not be there yet. In an object store: objects of up to 100,000 events, written once.",
)  # fmt: skip
@click.option("--since", type=TIME, help="Begin with the first event of this time or later.")
@click.option("--until", type=TIME, help="End with the last event before this time.")
@click.option(
    "--cursor", "cursor_path", type=click.Path(path_type=Path, dir_okay=False),
    help="Remember here how far it got, and go on from there; nothing is lost or repeated.",
)  # fmt: skip
@click.option("--follow", is_flag=True, help="Go on with new events as they come, until interrupted.")
@click.pass_context
def export(
    ctx: click.Context, *, tenant_id: TenantId | None, platform: bool, format_name: str, output: str,
    since: datetime | None, until: datetime | None, cursor_path: Path | None, follow: bool,
) -> None:  # fmt: skip
    """Export the audit trail of --tenant, of --platform, or by default of the key's own chain, oldest event first.

    With --cursor an export that was interrupted, even by kill -9, goes on so that the file is the same as if it had
    not been; and one that has ended goes on with what came since, in the same file or in another one.

    \b
    saltern audit export --tenant acme --output acme.jsonl --cursor acme.cursor
    saltern audit export --platform --format ocsf --follow --cursor siem.cursor | siem-agent
    saltern audit export --tenant acme --format parquet --since 2026-11-01 --output november.parquet
    saltern audit export --tenant acme --format parquet --output s3://lake/audit/acme --cursor acme.cursor
    """
    from saltern.audit.cursor import CursorFile
    from saltern.audit.exporting import TextExport, parquet_start, write_parquet
    from saltern.audit.lines import PLATFORM_CHAIN
    from saltern.audit.object_export import ObjectExport
    from saltern.objects import ObjectFolder, is_object_url

    if platform and tenant_id:
        raise click.UsageError("--tenant and --platform exclude each other")
    to_objects = is_object_url(output)
    if follow and (until is not None or (format_name == "parquet" and not to_objects)):
        raise click.UsageError("--follow goes on without end: it fits neither --until nor a file of --format parquet")
    admin = connect(ctx)
    owner = tenant_id or ("" if platform else admin.tenant_id)
    chain = owner or PLATFORM_CHAIN
    stretch = _Stretch(tenant_name(TenantId(owner)) if owner else "", since, until)
    cursor_file = CursorFile(cursor_path.absolute()) if cursor_path is not None else None
    try:
        if to_objects:
            folder = ObjectFolder(output)
            with closing(ObjectExport(chain, format_name, folder=folder, cursor_file=cursor_file)) as objects:
                events = _export_text(admin, stretch, objects, follow=follow)
        elif format_name == "parquet":
            after_sequence = parquet_start(chain, output, cursor_file)
            pages = _pages(admin, stretch, after_sequence)
            events = write_parquet(chain, pages, output, after_sequence, cursor_file)
        else:
            opened = TextExport(chain, format_name, output=output, stdout=sys.stdout.buffer, cursor_file=cursor_file)
            with closing(opened):
                events = _export_text(admin, stretch, opened, follow=follow)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise  # the reader has had enough
        raise InvalidArgumentError(
            f"cannot write the export: {error.strerror or error}",
            reason="FILE_NOT_WRITABLE",
            hint="make room and run it again; with --cursor it goes on where it stopped",
        ) from None
    if output != _STDOUT:
        say(f"{events} events of the chain {chain} exported", err=True)


def _export_text(admin: AdminClient, stretch: _Stretch, export: Any, *, follow: bool) -> int:
    """Write what there is and, with ``follow``, what comes; return how many events were written."""
    try:
        while True:
            try:
                for page in _pages(admin, stretch, export.after_sequence):
                    export.write(page)
            except UnavailableError:
                if not follow:
                    raise
            if not follow:
                export.finish()
                break
            export.save()
            time.sleep(_FOLLOW_EVERY_S)
    except (SalternError, KeyboardInterrupt):
        export.finish()  # what has arrived is whole: the next run goes on behind it
        raise
    return int(export.events)


def _pages(admin: AdminClient, stretch: _Stretch, after_sequence: int) -> Iterator[Page]:
    from saltern.admin.v1.audit_pb2 import ExportAuditEventsRequest
    from saltern.audit.exporting import Page

    request = ExportAuditEventsRequest(parent=stretch.parent, after_sequence=after_sequence)
    if stretch.since is not None:
        request.since.FromDatetime(stretch.since)
    if stretch.until is not None:
        request.until.FromDatetime(stretch.until)
    for response in admin.stream(admin.audit.ExportAuditEvents, request):
        yield Page(response.lines, response.events, response.last_sequence)
