"""``saltern audit``: who did what, when, and who was denied."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import click

from saltern.cli.audit_export import export
from saltern.cli.audit_verify import verify
from saltern.cli.confirmation import confirm, yes_option
from saltern.cli.failure import say
from saltern.cli.parameters import TENANT
from saltern.cli.render import Table, enum_word, local_time, message_dict, print_json, print_message, print_messages
from saltern.cli.settings import Group, settings_of
from saltern.cli.stack import connect
from saltern.cli.times import TIME
from saltern.names import TenantId, tenant_name

if TYPE_CHECKING:
    from saltern.admin.v1.audit_pb2 import AuditEvent

_LIMIT_MAX_ITEMS = 1_000_000
_OUTCOMES = ("success", "denied")


@click.group(cls=Group)
def audit() -> None:
    """Read, export and verify the audit trail."""


@audit.command("list")
@click.option("--tenant", "tenant_id", type=TENANT, help="This tenant's chain.")
@click.option("--platform", is_flag=True, help="The platform's own chain (platform-admin).")
@click.option(
    "--limit", "limit_items", type=click.IntRange(1, _LIMIT_MAX_ITEMS), default=100, show_default=True,
    help="Newest events to show.",
)  # fmt: skip
@click.option("--actor", default="", metavar="TEXT", help="Only events whose actor contains TEXT, such as a key's id.")
@click.option("--method", default="", metavar="TEXT", help="Only events whose method contains TEXT: CreateApiKey.")
@click.option("--outcome", type=click.Choice(_OUTCOMES), help="Only acts that happened, or attempts that were denied.")
@click.option("--since", type=TIME, help="Begin with the first event of this time or later.")
@click.option("--until", type=TIME, help="End with the last event before this time.")
@click.pass_context
def list_events(
    ctx: click.Context,
    *,
    tenant_id: TenantId | None,
    platform: bool,
    limit_items: int,
    actor: str,
    method: str,
    outcome: str | None,
    since: datetime | None,
    until: datetime | None,
) -> None:
    """List audit events, newest first: of --tenant, of --platform, or by default of the key's own chain."""
    from saltern.admin.v1.audit_pb2 import AuditEvent, ListAuditEventsRequest

    if platform and tenant_id:
        raise click.UsageError("--tenant and --platform exclude each other")
    admin = connect(ctx)
    owner = tenant_id or ("" if platform else admin.tenant_id)
    request = ListAuditEventsRequest(parent=tenant_name(TenantId(owner)) if owner else "", actor=actor, method=method)
    if outcome is not None:
        request.outcome = AuditEvent.Outcome.Value(f"OUTCOME_{outcome.upper()}")
    if since is not None:
        request.since.FromDatetime(since)
    if until is not None:
        request.until.FromDatetime(until)
    events: list[AuditEvent] = list(
        admin.iterate(admin.audit.ListAuditEvents, request, "audit_events", limit_items=limit_items)
    )
    table = Table("#", "TIME", "ACTOR", "FROM", "METHOD", "RESOURCE", "OUTCOME", "REASON", right=("#",))
    for item in events:
        table.add(
            item.name.rpartition("/")[2],
            local_time(item.event_time),
            item.actor,
            item.peer,
            item.method.rpartition(".")[2],
            item.resource,
            enum_word(item.Outcome, item.outcome, "OUTCOME_"),
            item.reason,
        )
    print_messages(settings_of(ctx), "auditEvents", events, table)


@audit.command("public-key")
@click.pass_context
def public_key(ctx: click.Context) -> None:
    """Print the public keys that verify checkpoints, as PEM, each with the time in which it signs.

    `saltern audit verify` takes them offline. After a rotation get them anew: retired keys are among them.

    Get them once, over a connection that you trust, and keep them where those who run the database cannot write:
    whoever replaces them decides what verifies.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from saltern.admin.v1.audit_pb2 import ListCheckpointKeysRequest
    from saltern.audit.public_keys import CheckpointPublicKey, encode_public_keys

    admin = connect(ctx)
    keys = admin.call(admin.audit.ListCheckpointKeys, ListCheckpointKeysRequest()).checkpoint_keys
    if settings_of(ctx).json:
        print_json({"checkpointKeys": [message_dict(key) for key in keys]})
    else:
        public = (
            CheckpointPublicKey(
                Ed25519PublicKey.from_public_bytes(key.public_key),
                from_us=key.create_time.ToMicroseconds(),
                until_us=key.retire_time.ToMicroseconds() if key.HasField("retire_time") else None,
            )
            for key in keys
        )
        say(encode_public_keys(public), nl=False)


@audit.command("rotate-checkpoint-key")
@yes_option
@click.pass_context
def rotate_checkpoint_key(ctx: click.Context, yes: bool) -> None:
    """Sign checkpoints with a new key from now on (platform-admin).

    What the old key has signed stays good; signs nothing any more. Every chain is signed with the new one within a
    minute. Give auditors the new output of `saltern audit public-key`: it says until when each key has signed, so that
    whoever has stolen the old key can sign nothing newer.
    """
    from saltern.admin.v1.audit_pb2 import RotateCheckpointKeyRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    confirm(yes, "Sign checkpoints with a new key? Auditors need the new output of `saltern audit public-key`.")
    request = RotateCheckpointKeyRequest(request_id=new_request_id())
    key = admin.call(admin.audit.RotateCheckpointKey, request)
    print_message(settings_of(ctx), key, [("id", key.key_id), ("signs since", local_time(key.create_time))])


audit.add_command(export)
audit.add_command(verify)
