"""``saltern tenant``: who pays and owns quota."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from saltern.cli.confirmation import confirm, yes_option
from saltern.cli.failure import say
from saltern.cli.parameters import TENANT, TEXT
from saltern.cli.render import Table, enum_word, local_time, print_json, print_message, print_messages
from saltern.cli.settings import Group, settings_of
from saltern.cli.signing import revoke_tenant_tokens
from saltern.cli.stack import connect
from saltern.cli.waiting import wait_option
from saltern.names import TenantId, tenant_name

if TYPE_CHECKING:
    from saltern.admin.v1.tenants_pb2 import Tenant


@click.group(cls=Group)
def tenant() -> None:
    """Create, show, change, suspend and delete tenants."""


@tenant.command("create")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.option("--display-name", type=TEXT, default="", help="For people; at most 128 characters.")
@wait_option
@click.pass_context
def create(ctx: click.Context, tenant_id: TenantId, display_name: str) -> None:
    """Create a tenant. It may store nothing until `saltern quota set` gives it a quota."""
    from saltern.admin.v1.tenants_pb2 import CreateTenantRequest, Tenant
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    request = CreateTenantRequest(
        tenant_id=tenant_id, tenant=Tenant(display_name=display_name), request_id=new_request_id()
    )
    _print(ctx, admin.call(admin.tenants.CreateTenant, request))


@tenant.command("list")
@click.pass_context
def list_tenants(ctx: click.Context) -> None:
    """List all tenants (platform-admin)."""
    from saltern.admin.v1.tenants_pb2 import ListTenantsRequest

    admin = connect(ctx)
    tenants: list[Tenant] = list(admin.iterate(admin.tenants.ListTenants, ListTenantsRequest(), "tenants"))
    table = Table("TENANT", "DISPLAY NAME", "STATE", "CREATED")
    for item in tenants:
        table.add(item.name.removeprefix("tenants/"), item.display_name, _state(item), local_time(item.create_time))
    print_messages(settings_of(ctx), "tenants", tenants, table)


@tenant.command("get")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.pass_context
def get(ctx: click.Context, tenant_id: TenantId) -> None:
    """Show one tenant."""
    from saltern.admin.v1.tenants_pb2 import GetTenantRequest

    admin = connect(ctx)
    _print(ctx, admin.call(admin.tenants.GetTenant, GetTenantRequest(name=tenant_name(tenant_id))))


@tenant.command("update")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.option("--display-name", type=TEXT, required=True, help="The new display name; may be empty.")
@click.option("--etag", type=TEXT, default="", help="Refuse unless the tenant still has this etag.")
@wait_option
@click.pass_context
def update(ctx: click.Context, tenant_id: TenantId, display_name: str, etag: str) -> None:
    """Change a tenant's display name."""
    from saltern.admin.v1.tenants_pb2 import Tenant, UpdateTenantRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    changed = Tenant(name=tenant_name(tenant_id), display_name=display_name, etag=etag)
    _print(
        ctx, admin.call(admin.tenants.UpdateTenant, UpdateTenantRequest(tenant=changed, request_id=new_request_id()))
    )


@tenant.command("delete")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@yes_option
@wait_option
@click.pass_context
def delete(ctx: click.Context, tenant_id: TenantId, yes: bool) -> None:
    """Delete a tenant, its namespaces, keys and cached entries; its audit trail stays (I12)."""
    from saltern.admin.v1.tenants_pb2 import DeleteTenantRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    confirm(yes, f"Delete tenant {tenant_id} with all its namespaces, keys and cached entries?")
    request = DeleteTenantRequest(name=tenant_name(tenant_id), request_id=new_request_id())
    admin.call(admin.tenants.DeleteTenant, request)
    if settings_of(ctx).json:
        print_json({})
    else:
        say(f"deleted {tenant_name(tenant_id)}")


@tenant.command("suspend")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@yes_option
@wait_option
@click.pass_context
def suspend(ctx: click.Context, tenant_id: TenantId, yes: bool) -> None:
    """Refuse the tenant new sessions and tokens until it is resumed."""
    from saltern.admin.v1.tenants_pb2 import SuspendTenantRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    confirm(yes, f"Suspend tenant {tenant_id}? Its clients lose the cache until it is resumed.")
    request = SuspendTenantRequest(name=tenant_name(tenant_id), request_id=new_request_id())
    _print(ctx, admin.call(admin.tenants.SuspendTenant, request))


@tenant.command("resume")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@wait_option
@click.pass_context
def resume(ctx: click.Context, tenant_id: TenantId) -> None:
    """Let a suspended tenant work again."""
    from saltern.admin.v1.tenants_pb2 import ResumeTenantRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    request = ResumeTenantRequest(name=tenant_name(tenant_id), request_id=new_request_id())
    _print(ctx, admin.call(admin.tenants.ResumeTenant, request))


@tenant.command("revoke-tokens")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@yes_option
@wait_option
@click.pass_context
def revoke_tokens(ctx: click.Context, tenant_id: TenantId, yes: bool) -> None:
    """End every token of a tenant at once, on every node; its API keys stay, and their next tokens are good."""
    revoke_tenant_tokens(ctx, connect(ctx), tenant_id, yes=yes)


def _state(item: Tenant) -> str:
    return enum_word(item.State, item.state, "STATE_")


def _print(ctx: click.Context, item: Tenant) -> None:
    rows = [
        ("tenant", item.name.removeprefix("tenants/")),
        ("display name", item.display_name),
        ("state", _state(item)),
        ("created", local_time(item.create_time)),
        ("updated", local_time(item.update_time)),
        ("etag", item.etag),
    ]
    print_message(settings_of(ctx), item, rows)
