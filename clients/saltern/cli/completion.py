"""``saltern completion``: what a shell must evaluate; and names that the service completes.

Names are asked for with a short deadline. Whatever goes wrong, completion stays silent: nobody wants an error in the
middle of a line that is being typed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from saltern.cli.failure import say
from saltern.cli.settings import DEADLINE_DEFAULT_MS, Command, settings_of

if TYPE_CHECKING:
    from saltern.admin_client import AdminClient

VARIABLE: Final = "_SALTERN_COMPLETE"
SHELLS: Final = ("bash", "zsh", "fish")
#: For each call and for all names, unless --deadline-ms or SALTERN_DEADLINE_MS says otherwise.
DEADLINE_MS: Final = 1000
_SHOWN_MAX: Final = 200
_Lister = Callable[["AdminClient", str], Iterable[str]]


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print what makes bash, zsh or fish complete commands, options and names.

    Names of tenants, namespaces, keys, groups and nodes are asked of the control plane that the command would call, for
    at most a second; where that fails nothing is offered. bash 4.4 or later.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    # Not kind.source(): for bash that would run the bash in the path to ask its version, and there may be none here.
    say(ShellComplete.source(kind(click.get_current_context().find_root().command, {}, "saltern", VARIABLE)))


def complete(shell_complete_main: Callable[..., Any]) -> None:
    """Answer a shell that asks for completions; ends the process without a word on stderr."""
    os.environ["GRPC_VERBOSITY"] = "NONE"
    try:
        shell_complete_main(prog_name="saltern", complete_var=VARIABLE)
    except Exception:
        raise SystemExit(1) from None


def tenants(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    return _ask(ctx, incomplete, _tenant_ids)


def namespaces(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Of the tenant that the line names before; else of the tenant of the key."""
    return _ask(ctx, incomplete, lambda admin, _: _namespace_ids(admin, _tenant_of(ctx, admin)))


def api_keys(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Of ``--tenant``, of the tenant of the key, or of the platform."""
    return _ask(ctx, incomplete, lambda admin, _: _api_key_ids(admin, _tenant_of(ctx, admin)))


def nodes(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    return _ask(ctx, incomplete, _node_ids)


def groups(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """``OWNER/`` first, then the owner's groups."""
    return _ask(ctx, incomplete, lambda admin, text: _in_two_parts(admin, text, _group_ids))


def members(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """``TENANT/`` first, then its namespaces."""
    return _ask(ctx, incomplete, lambda admin, text: _in_two_parts(admin, text, _namespace_ids))


def _ask(ctx: click.Context, incomplete: str, names: _Lister) -> list[CompletionItem]:
    try:
        with _client(ctx) as admin:
            end_s = time.monotonic() + _deadline_ms(ctx) / 1000
            found = (name for name in _until(end_s, names(admin, incomplete)) if name.startswith(incomplete))
            return [CompletionItem(name) for name in islice(found, _SHOWN_MAX)]
    except Exception:
        return []  # whatever it was, the line that is being typed is not the place to say it


def _until(end_s: float, names: Iterable[str]) -> Iterator[str]:
    """The names that come before ``end_s``, a time of ``time.monotonic()``."""
    for name in names:
        yield name
        if time.monotonic() > end_s:
            return


@contextmanager
def _client(ctx: click.Context) -> Iterator[AdminClient]:
    from saltern.admin_client import AdminClient
    from saltern.cli.stack import find_target

    target = find_target(settings_of(ctx))
    with closing(AdminClient(target.control, target.api_key, deadline_ms=_deadline_ms(ctx), tls=target.tls)) as admin:
        yield admin


def _deadline_ms(ctx: click.Context) -> int:
    given_ms = settings_of(ctx).deadline_ms
    return DEADLINE_MS if given_ms == DEADLINE_DEFAULT_MS else given_ms


def _tenant_of(ctx: click.Context, admin: AdminClient) -> str:
    return str(ctx.params.get("tenant_id") or admin.tenant_id)


def _tenant_ids(admin: AdminClient, _: str) -> Iterable[str]:
    from saltern.admin.v1.tenants_pb2 import ListTenantsRequest

    if admin.tenant_id:
        return [admin.tenant_id]
    return _last_parts(admin.iterate(admin.tenants.ListTenants, ListTenantsRequest(), "tenants"))


def _namespace_ids(admin: AdminClient, tenant: str) -> Iterable[str]:
    from saltern.admin.v1.namespaces_pb2 import ListNamespacesRequest

    request = ListNamespacesRequest(parent=f"tenants/{tenant}")
    return _last_parts(admin.iterate(admin.namespaces.ListNamespaces, request, "namespaces"))


def _api_key_ids(admin: AdminClient, tenant: str) -> Iterable[str]:
    from saltern.admin.v1.credentials_pb2 import ListApiKeysRequest

    request = ListApiKeysRequest(parent=f"tenants/{tenant}" if tenant else "")
    return _last_parts(admin.iterate(admin.credentials.ListApiKeys, request, "api_keys"))


def _group_ids(admin: AdminClient, owner: str) -> Iterable[str]:
    from saltern.admin.v1.sharing_groups_pb2 import ListSharingGroupsRequest

    viewer = admin.tenant_id or owner
    request = ListSharingGroupsRequest(parent=f"tenants/{viewer}")
    listed = admin.iterate(admin.sharing_groups.ListSharingGroups, request, "sharing_groups")
    return _last_parts(group for group in listed if group.name.startswith(f"tenants/{owner}/"))


def _node_ids(admin: AdminClient, _: str) -> Iterable[str]:
    from saltern.admin.v1.usage_pb2 import ListNodesRequest

    return _last_parts(admin.iterate(admin.usage.ListNodes, ListNodesRequest(), "nodes"))


def _in_two_parts(admin: AdminClient, incomplete: str, below: _Lister) -> Iterable[str]:
    tenant, slash, _ = incomplete.partition("/")
    if slash:
        return (f"{tenant}/{name}" for name in below(admin, tenant))
    return (f"{name}/" for name in _tenant_ids(admin, ""))


def _last_parts(items: Iterable[Any]) -> Iterator[str]:
    return (item.name.rpartition("/")[2] for item in items)
