"""``saltern namespace``: one model deployment's cache each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from saltern.cli.confirmation import confirm, yes_option
from saltern.cli.parameters import NAMESPACE, SIZE, TENANT, TEXT
from saltern.cli.render import Table, local_time, print_json, print_message, print_messages
from saltern.cli.settings import Group, settings_of
from saltern.cli.stack import connect
from saltern.cli.waiting import wait_option
from saltern.names import NamespaceId, TenantId, namespace_name, tenant_name
from saltern.sizes import format_size

if TYPE_CHECKING:
    from saltern.admin.v1.namespaces_pb2 import Namespace

_BLOCK_TOKENS_MAX = 65536


@click.group(cls=Group)
def namespace() -> None:
    """Create, show and delete namespaces."""


@namespace.command("create")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.argument("namespace_id", metavar="NAMESPACE", type=NAMESPACE)
@click.option(
    "--model-fingerprint",
    type=TEXT,
    required=True,
    help="Everything that must match for cached bytes to be interchangeable, e.g. model@revision/dtype/layout.",
)
@click.option("--block-tokens", type=click.IntRange(1, _BLOCK_TOKENS_MAX), required=True, help="Tokens in one block.")
@click.option("--block-bytes", type=SIZE, required=True, help="The largest entry, e.g. 2MiB; at most 64MiB.")
@wait_option
@click.pass_context
def create(
    ctx: click.Context,
    *,
    tenant_id: TenantId,
    namespace_id: NamespaceId,
    model_fingerprint: str,
    block_tokens: int,
    block_bytes: int,
) -> None:
    """Create a namespace. What is given here is fixed for its life."""
    from saltern.admin.v1.namespaces_pb2 import CreateNamespaceRequest, Namespace
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    request = CreateNamespaceRequest(
        parent=tenant_name(tenant_id),
        namespace_id=namespace_id,
        namespace=Namespace(model_fingerprint=model_fingerprint, block_tokens=block_tokens, block_bytes=block_bytes),
        request_id=new_request_id(),
    )
    _print(ctx, admin.call(admin.namespaces.CreateNamespace, request))


@namespace.command("list")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.pass_context
def list_namespaces(ctx: click.Context, tenant_id: TenantId) -> None:
    """List a tenant's namespaces."""
    from saltern.admin.v1.namespaces_pb2 import ListNamespacesRequest

    admin = connect(ctx)
    request = ListNamespacesRequest(parent=tenant_name(tenant_id))
    namespaces: list[Namespace] = list(admin.iterate(admin.namespaces.ListNamespaces, request, "namespaces"))
    table = Table("NAMESPACE", "MODEL", "BLOCK TOKENS", "BLOCK BYTES", "CREATED", right=("BLOCK TOKENS", "BLOCK BYTES"))
    for item in namespaces:
        table.add(
            item.name.rpartition("/")[2],
            item.model_fingerprint,
            item.block_tokens,
            format_size(item.block_bytes),
            local_time(item.create_time),
        )
    print_messages(settings_of(ctx), "namespaces", namespaces, table)


@namespace.command("get")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.argument("namespace_id", metavar="NAMESPACE", type=NAMESPACE)
@click.pass_context
def get(ctx: click.Context, tenant_id: TenantId, namespace_id: NamespaceId) -> None:
    """Show one namespace."""
    from saltern.admin.v1.namespaces_pb2 import GetNamespaceRequest

    admin = connect(ctx)
    request = GetNamespaceRequest(name=namespace_name(tenant_id, namespace_id))
    _print(ctx, admin.call(admin.namespaces.GetNamespace, request))


@namespace.command("delete")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.argument("namespace_id", metavar="NAMESPACE", type=NAMESPACE)
@yes_option
@wait_option
@click.pass_context
def delete(ctx: click.Context, tenant_id: TenantId, namespace_id: NamespaceId, yes: bool) -> None:
    """Delete a namespace; nodes drop its entries."""
    from saltern.admin.v1.namespaces_pb2 import DeleteNamespaceRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    name = namespace_name(tenant_id, namespace_id)
    confirm(yes, f"Delete {name} with all its cached entries?")
    admin.call(admin.namespaces.DeleteNamespace, DeleteNamespaceRequest(name=name, request_id=new_request_id()))
    if settings_of(ctx).json:
        print_json({})
    else:
        click.echo(f"deleted {name}")


def _print(ctx: click.Context, item: Namespace) -> None:
    _, tenant_id, _, namespace_id = item.name.split("/")
    rows = [
        ("namespace", namespace_id),
        ("tenant", tenant_id),
        ("model", item.model_fingerprint),
        ("block tokens", item.block_tokens),
        ("block bytes", format_size(item.block_bytes)),
        ("created", local_time(item.create_time)),
        ("etag", item.etag),
    ]
    print_message(settings_of(ctx), item, rows)
