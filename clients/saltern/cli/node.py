"""``saltern node``: the cache nodes, and what an operator does with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from saltern.cli.confirmation import confirm, yes_option
from saltern.cli.failure import say
from saltern.cli.parameters import NODE
from saltern.cli.render import Table, enum_word, local_time, message_dict, print_json, print_messages
from saltern.cli.settings import Command, Group, settings_of
from saltern.cli.stack import connect
from saltern.cli.waiting import wait_option
from saltern.names import NodeId, node_name
from saltern.sizes import format_size

if TYPE_CHECKING:
    from saltern.admin.v1.usage_pb2 import Node


@click.group("node", cls=Group)
def node() -> None:
    """Show the cache nodes; cordon, drain and remove them."""


@node.command("list", cls=Command)
@click.pass_context
def list_nodes(ctx: click.Context) -> None:
    """List the nodes that ever registered (platform-admin).

    GRANTED is what a node holds of all quotas; HELD the most that it may still go by. They differ while it gives
    something back. LEASE: until then a node that is silent may grow; its part goes to the others after.
    POLICY is what a node has applied, SETTLED the newest with nothing left above its limits, BEHIND how many versions
    the newest policy is ahead of it: one that stays behind is frozen, slow, cut off or refuses the policy.
    """
    from saltern.admin.v1.usage_pb2 import ListNodesRequest

    admin = connect(ctx)
    nodes: list[Node] = list(admin.iterate(admin.usage.ListNodes, ListNodesRequest(), "nodes"))
    right = ("DRAM", "GRANTED", "HELD", "POLICY", "SETTLED", "BEHIND")
    left = ("NODE", "STATE", "WIRE", "GRPC")
    table = Table(*left, *right, "LAST REPORT", "LEASE", right=right)
    for item in nodes:
        table.add(
            item.name.removeprefix("nodes/"),
            _state(item),
            item.wire_endpoint,
            item.grpc_endpoint,
            format_size(item.dram_capacity_bytes),
            format_size(item.granted_bytes),
            format_size(item.believed_bytes),
            item.policy_version,
            item.settled_version,
            item.policy_lag,
            local_time(item.last_report_time),
            local_time(item.lease_expire_time) if item.HasField("lease_expire_time") else "-",
        )
    print_messages(settings_of(ctx), "nodes", nodes, table)


@node.command("cordon", cls=Command)
@click.argument("node_id", metavar="NODE", type=NODE)
@wait_option
@click.pass_context
def cordon(ctx: click.Context, node_id: str) -> None:
    """Send new sessions to other nodes; NODE keeps what it holds and serves on."""
    from saltern.admin.v1.nodes_pb2 import CordonNodeRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    request = CordonNodeRequest(name=node_name(NodeId(node_id)), request_id=new_request_id())
    _print(ctx, admin.call(admin.nodes.CordonNode, request))


@node.command("drain", cls=Command)
@click.argument("node_id", metavar="NODE", type=NODE)
@wait_option
@click.pass_context
def drain(ctx: click.Context, node_id: str) -> None:
    """Cordon NODE and give its part of quotas to the other nodes. What it holds is evicted.

    When `saltern node list` shows that it holds nothing, stop it; then it can be removed.
    """
    from saltern.admin.v1.nodes_pb2 import DrainNodeRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    request = DrainNodeRequest(name=node_name(NodeId(node_id)), request_id=new_request_id())
    _print(ctx, admin.call(admin.nodes.DrainNode, request))


@node.command("uncordon", cls=Command)
@click.argument("node_id", metavar="NODE", type=NODE)
@wait_option
@click.pass_context
def uncordon(ctx: click.Context, node_id: str) -> None:
    """Undo cordon and drain: NODE takes sessions again, and its part of quotas."""
    from saltern.admin.v1.nodes_pb2 import UncordonNodeRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    request = UncordonNodeRequest(name=node_name(NodeId(node_id)), request_id=new_request_id())
    _print(ctx, admin.call(admin.nodes.UncordonNode, request))


@node.command("remove", cls=Command)
@click.argument("node_id", metavar="NODE", type=NODE)
@yes_option
@wait_option
@click.pass_context
def remove(ctx: click.Context, node_id: str, yes: bool) -> None:
    """Forget NODE, which is stopped or lost and may not grow any more, with what it reported."""
    from saltern.admin.v1.nodes_pb2 import RemoveNodeRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    name = node_name(NodeId(node_id))
    confirm(yes, f"Remove {name}?")
    admin.call(admin.nodes.RemoveNode, RemoveNodeRequest(name=name, request_id=new_request_id()))
    if settings_of(ctx).json:
        print_json({})
    else:
        say(f"removed {name}")


def _state(item: Node) -> str:
    """``live``, or with what the operator wants of it: ``live, draining``."""
    state = enum_word(item.State, item.state, "STATE_")
    if item.admin_state in (item.ADMIN_STATE_UNSPECIFIED, item.ADMIN_STATE_ACTIVE):
        return state
    return f"{state}, {enum_word(item.AdminState, item.admin_state, 'ADMIN_STATE_')}"


def _print(ctx: click.Context, item: Node) -> None:
    if settings_of(ctx).json:
        print_json(message_dict(item))
    else:
        held = format_size(item.believed_bytes)
        say(f"{item.name.removeprefix('nodes/')}: {_state(item)}, holds {held} of quotas")
