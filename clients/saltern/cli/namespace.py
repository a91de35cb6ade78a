"""``saltern namespace``: one model deployment's cache each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from saltern.cli.confirmation import confirm, yes_option
from saltern.cli.failure import say
from saltern.cli.parameters import LIMIT, NAMESPACE, NO_LIMIT, SIZE, TENANT, TEXT
from saltern.cli.render import Table, enum_word, local_time, print_json, print_message, print_messages
from saltern.cli.settings import Group, settings_of
from saltern.cli.stack import connect
from saltern.cli.waiting import wait_option
from saltern.names import NamespaceId, TenantId, namespace_name, tenant_name
from saltern.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from saltern.admin.v1.namespaces_pb2 import Namespace, NamespaceLimit
    from saltern.admin.v1.quotas_pb2 import Tier

_BLOCK_TOKENS_MAX = 65536


@click.group(cls=Group)
def namespace() -> None:
    """Create, show, limit and delete namespaces."""


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
@click.option("--dram-limit", type=SIZE, help="What it may hold of its tenant's DRAM, e.g. 64MiB (I4).")
@click.option("--ssd-limit", type=SIZE, help="The same for the nodes' SSD tier; 0 keeps it off.")
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
    dram_limit: int | None,
    ssd_limit: int | None,
) -> None:
    """Create a namespace. Its limits can be changed later; the model and the blocks are fixed for its life."""
    from saltern.admin.v1.namespaces_pb2 import CreateNamespaceRequest, Namespace
    from saltern.admin.v1.quotas_pb2 import TIER_DRAM, TIER_SSD
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    limits = _changed_limits((), {TIER_DRAM: dram_limit, TIER_SSD: ssd_limit})
    request = CreateNamespaceRequest(
        parent=tenant_name(tenant_id),
        namespace_id=namespace_id,
        namespace=Namespace(
            model_fingerprint=model_fingerprint,
            block_tokens=block_tokens,
            block_bytes=block_bytes,
            tier_limits=limits,
        ),
        request_id=new_request_id(),
    )
    _print(ctx, admin.call(admin.namespaces.CreateNamespace, request))


@namespace.command("update")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.argument("namespace_id", metavar="NAMESPACE", type=NAMESPACE)
@click.option("--dram-limit", type=LIMIT, help="What it may hold of its tenant's DRAM, e.g. 64MiB; none for all of it.")
@click.option("--ssd-limit", type=LIMIT, help="The same for the nodes' SSD tier; 0 keeps it off.")
@click.option("--etag", type=TEXT, default="", help="Refuse unless the namespace still has this etag.")
@wait_option
@click.pass_context
def update(
    ctx: click.Context,
    *,
    tenant_id: TenantId,
    namespace_id: NamespaceId,
    dram_limit: int | str | None,
    ssd_limit: int | str | None,
    etag: str,
) -> None:
    """Change a namespace's limits. What is not given keeps its value.

    Nodes evict the namespace's coldest entries down to a limit that is lowered below what it holds.
    """
    from saltern.admin.v1.namespaces_pb2 import GetNamespaceRequest, Namespace, UpdateNamespaceRequest
    from saltern.admin.v1.quotas_pb2 import TIER_DRAM, TIER_SSD
    from saltern.admin_client import new_request_id

    if dram_limit is None and ssd_limit is None:
        raise click.UsageError("nothing to change: give --dram-limit or --ssd-limit")
    admin = connect(ctx)
    name = namespace_name(tenant_id, namespace_id)
    current = admin.call(admin.namespaces.GetNamespace, GetNamespaceRequest(name=name))
    limits = _changed_limits(current.tier_limits, {TIER_DRAM: dram_limit, TIER_SSD: ssd_limit})
    # The limit that is not given is taken over from what was read: its etag guards it against a change in between.
    changed = Namespace(name=name, tier_limits=limits, etag=etag or current.etag)
    request = UpdateNamespaceRequest(namespace=changed, request_id=new_request_id())
    request.update_mask.paths.append("tier_limits")
    _print(ctx, admin.call(admin.namespaces.UpdateNamespace, request))


@namespace.command("list")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.pass_context
def list_namespaces(ctx: click.Context, tenant_id: TenantId) -> None:
    """List a tenant's namespaces."""
    from saltern.admin.v1.namespaces_pb2 import ListNamespacesRequest

    admin = connect(ctx)
    request = ListNamespacesRequest(parent=tenant_name(tenant_id))
    namespaces: list[Namespace] = list(admin.iterate(admin.namespaces.ListNamespaces, request, "namespaces"))
    right = ("BLOCK TOKENS", "BLOCK BYTES")
    table = Table("NAMESPACE", "MODEL", "BLOCK TOKENS", "BLOCK BYTES", "LIMITS", "CREATED", right=right)
    for item in namespaces:
        table.add(
            item.name.rpartition("/")[2],
            item.model_fingerprint,
            item.block_tokens,
            format_size(item.block_bytes),
            _limits_text(item),
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
        say(f"deleted {name}")


def _changed_limits(
    current: Iterable[NamespaceLimit], wanted: dict[Tier.ValueType, int | str | None]
) -> list[NamespaceLimit]:
    """The limits as they are now with those of ``wanted``: None keeps one, ``NO_LIMIT`` lifts it."""
    from saltern.admin.v1.namespaces_pb2 import NamespaceLimit

    limits: dict[Tier.ValueType, int | str] = {limit.tier: limit.limit_bytes for limit in current}
    limits |= {tier: limit_bytes for tier, limit_bytes in wanted.items() if limit_bytes is not None}
    return [
        NamespaceLimit(tier=tier, limit_bytes=int(limit_bytes))
        for tier, limit_bytes in limits.items()
        if limit_bytes != NO_LIMIT
    ]


def _limits_text(item: Namespace) -> str:
    from saltern.admin.v1.quotas_pb2 import Tier

    limits = [f"{enum_word(Tier, limit.tier, 'TIER_')} {format_size(limit.limit_bytes)}" for limit in item.tier_limits]
    return ", ".join(limits) or NO_LIMIT


def _print(ctx: click.Context, item: Namespace) -> None:
    _, tenant_id, _, namespace_id = item.name.split("/")
    rows = [
        ("namespace", namespace_id),
        ("tenant", tenant_id),
        ("model", item.model_fingerprint),
        ("block tokens", item.block_tokens),
        ("block bytes", format_size(item.block_bytes)),
        ("limits", _limits_text(item)),
        ("created", local_time(item.create_time)),
        ("etag", item.etag),
    ]
    print_message(settings_of(ctx), item, rows)
