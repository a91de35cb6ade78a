"""``saltern salt``: how narrowly a tenant's blocks are named, and when its salt is another one; never a salt."""

from __future__ import annotations

from copy import copy
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import click

from saltern.cli.confirmation import confirm, yes_option
from saltern.cli.failure import say
from saltern.cli.parameters import DURATION, TENANT, TEXT
from saltern.cli.render import Table, enum_word, local_time, message_dict, print_json
from saltern.cli.settings import Group, settings_of
from saltern.cli.stack import connect
from saltern.cli.waiting import wait_option
from saltern.names import TenantId, salt_policy_name

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from saltern.admin.v1.salt_policies_pb2 import SaltPolicy
    from saltern.admin_client import AdminClient

_SCOPES: Final = ("tenant", "namespace", "project", "user", "session")
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
_etag_option = click.option("--etag", type=TEXT, default="", help="Refuse unless the policy still has this etag.")


@click.group(cls=Group)
def salt() -> None:
    """Show and change salt policies, rotate salts."""


@salt.command("get")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.pass_context
def get(ctx: click.Context, tenant_id: TenantId) -> None:
    """Show a tenant's salt policy and its readable epochs, never a salt."""
    _print(ctx, tenant_id, _read(connect(ctx), tenant_id))


# The name that it had when there was nothing to set.
_show = copy(get)
_show.name, _show.hidden = "show", True
salt.add_command(_show)


@salt.command("set")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.option("--scope", type=click.Choice(_SCOPES), help="The least that every salt is narrowed to.")
@click.option("--rotate-every", type=DURATION, help="Begin a new epoch when one is so old: 1h to 400d.")
@click.option("--no-schedule", is_flag=True, help="Rotate on demand alone.")
@click.option("--grace", type=DURATION, help="How long the epoch before stays readable, up to 90d.")
@click.option("--no-grace", is_flag=True, help="A rotation ends the epoch before at once.")
@_etag_option
@yes_option
@wait_option
@click.pass_context
def set_policy(
    ctx: click.Context,
    *,
    tenant_id: TenantId,
    scope: str | None,
    rotate_every: timedelta | None,
    no_schedule: bool,
    grace: timedelta | None,
    no_grace: bool,
    etag: str,
    yes: bool,
) -> None:
    """Change a tenant's salt policy. What is not given keeps its value.

    Another scope names every block anew: it begins a new epoch, and nothing that is stored now is found again. With the
    scopes project, user and session clients must say which one they are for, or use a key that is bound to it.

    \b
    saltern salt set acme --rotate-every 30d --grace 24h
    saltern salt set acme --scope user
    """
    from saltern.admin.v1.salt_policies_pb2 import SaltPolicy, UpdateSaltPolicyRequest
    from saltern.admin_client import new_request_id

    if no_schedule and rotate_every is not None:
        raise click.UsageError("--rotate-every and --no-schedule exclude each other")
    if no_grace and grace is not None:
        raise click.UsageError("--grace and --no-grace exclude each other")
    policy = SaltPolicy(name=salt_policy_name(tenant_id), etag=etag)
    request = UpdateSaltPolicyRequest(request_id=new_request_id())
    if scope is not None:
        policy.scope = SaltPolicy.Scope.Value(f"SCOPE_{scope.upper()}")
        request.update_mask.paths.append("scope")
    if no_schedule or rotate_every is not None:
        policy.rotation_period.FromTimedelta(rotate_every or timedelta(0))
        request.update_mask.paths.append("rotation_period")
    if no_grace or grace is not None:
        policy.grace_period.FromTimedelta(grace or timedelta(0))
        request.update_mask.paths.append("grace_period")
    if not request.update_mask.paths:
        raise click.UsageError("nothing to set: give --scope, --rotate-every, --no-schedule, --grace or --no-grace")
    admin = connect(ctx)
    if scope is not None and _read(admin, tenant_id).scope != policy.scope:
        confirm(yes, f"Give {tenant_id} salts of the scope {scope}? Nothing that it has stored is found again.")
    request.salt_policy.CopyFrom(policy)
    _print(ctx, tenant_id, admin.call(admin.salt_policies.UpdateSaltPolicy, request))


@salt.command("rotate")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.option("--grace", type=DURATION, help="How long the epoch before stays readable; else what the policy says.")
@click.option("--no-grace", is_flag=True, help="End every earlier epoch at once: its salt may be known to others.")
@_etag_option
@yes_option
@wait_option
@click.pass_context
def rotate(
    ctx: click.Context, *, tenant_id: TenantId, grace: timedelta | None, no_grace: bool, etag: str, yes: bool
) -> None:
    """Begin a new salt epoch at once; the one before stays readable for the grace period.

    When its grace is over, an epoch's entries are purged on every node and its root is destroyed: nobody reads them any
    more, whatever they have kept.

    \b
    saltern salt rotate acme
    saltern salt rotate acme --no-grace   (somebody may know a salt of this tenant)
    """
    from saltern.admin.v1.salt_policies_pb2 import RotateSaltRequest
    from saltern.admin_client import new_request_id

    if no_grace and grace is not None:
        raise click.UsageError("--grace and --no-grace exclude each other")
    admin = connect(ctx)
    request = RotateSaltRequest(name=salt_policy_name(tenant_id), etag=etag, request_id=new_request_id())
    if no_grace or grace is not None:
        request.grace_period.FromTimedelta(grace or timedelta(0))
    if no_grace or (grace is None and not _read(admin, tenant_id).grace_period.seconds):
        confirm(yes, f"End every salt epoch of {tenant_id} now? Nothing that it has stored is found again.")
    _print(ctx, tenant_id, admin.call(admin.salt_policies.RotateSalt, request))


def _read(admin: AdminClient, tenant_id: TenantId) -> SaltPolicy:
    from saltern.admin.v1.salt_policies_pb2 import GetSaltPolicyRequest

    return admin.call(admin.salt_policies.GetSaltPolicy, GetSaltPolicyRequest(name=salt_policy_name(tenant_id)))


def _print(ctx: click.Context, tenant_id: TenantId, policy: SaltPolicy) -> None:
    settings = settings_of(ctx)
    if settings.json:
        print_json(message_dict(policy))
        return
    facts = Table()
    facts.add("tenant", tenant_id)
    facts.add("scope", enum_word(policy.Scope, policy.scope, "SCOPE_"))
    facts.add(
        "rotates", f"every {_duration(policy.rotation_period)}" if policy.rotation_period.seconds else "on demand"
    )
    facts.add("next rotation", local_time(policy.next_rotation_time))
    facts.add("grace", _duration(policy.grace_period) if policy.grace_period.seconds else "none")
    facts.add("updated", local_time(policy.update_time))
    facts.print(settings)
    epochs = Table("EPOCH", "BEGAN", "READABLE UNTIL", right=("EPOCH",))
    for epoch in policy.epochs:
        epochs.add(epoch.epoch, local_time(epoch.create_time), local_time(epoch.read_until_time) or "(current)")
    say()
    epochs.print(settings)


def _duration(value: Duration) -> str:
    """In the largest unit that divides it, as ``--grace`` takes it back."""
    size, unit = next((size, unit) for size, unit in _UNITS if value.seconds % size == 0)
    return f"{value.seconds // size}{unit}"
