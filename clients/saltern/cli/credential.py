"""``saltern key``: long-lived API keys; ``saltern token``: what they are exchanged for."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from saltern.cli.confirmation import confirm, yes_option
from saltern.cli.failure import say
from saltern.cli.parameters import API_KEY_ID, DURATION, NAMESPACE, NODE, TENANT, TEXT
from saltern.cli.render import Table, enum_word, local_time, message_dict, print_json, print_messages
from saltern.cli.secret_file import secret_file
from saltern.cli.settings import Group, settings_of
from saltern.cli.signing import revoke_key_tokens, token
from saltern.cli.stack import connect
from saltern.cli.waiting import wait_option
from saltern.keys import Narrowing
from saltern.names import ApiKeyId, NamespaceId, TenantId, api_key_name, tenant_name

if TYPE_CHECKING:
    from saltern.admin.v1.credentials_pb2 import ApiKey
    from saltern.admin_client import AdminClient

_ROLES: Final = ("platform-admin", "tenant-admin", "tenant-auditor", "writer", "reader", "node")
_PLATFORM_ROLES: Final = frozenset({"platform-admin", "node"})
_tenant_option = click.option(
    "--tenant",
    "tenant_id",
    type=TENANT,
    help="Tenant of the key; by default that of the key you use, for a platform key: the platform.",
)
_FILE: Final = click.Path(dir_okay=False, path_type=Path)


@click.group(cls=Group)
def key() -> None:
    """Create, list, rotate and delete API keys: the identities of services and people."""


@key.command("create")
@click.argument("key_id", metavar="KEY", type=API_KEY_ID)
@_tenant_option
@click.option("--role", type=click.Choice(_ROLES), required=True, help="What the key may do.")
@click.option("--display-name", type=TEXT, default="", help="For people.")
@click.option("--expires-in", type=DURATION, help="Such as 90d; by default it does not expire.")
@click.option("--project", type=TEXT, default="", help="Bind a writer or reader to this project's salts, for good.")
@click.option("--user", type=TEXT, default="", help="Bind a writer or reader to this user's salts, for good.")
@click.option("--node", "node_id", type=NODE, help="The one node that a key of the role node may serve as.")
@click.option("--save", type=_FILE, metavar="FILE", help="Write the secret to FILE (mode 0600) instead of showing it.")
@wait_option
@click.pass_context
def create(
    ctx: click.Context,
    *,
    key_id: str,
    tenant_id: TenantId | None,
    role: str,
    display_name: str,
    expires_in: timedelta | None,
    project: str,
    user: str,
    node_id: str | None,
    save: Path | None,
) -> None:
    """Create an API key. Its secret is shown this once, alone on stdout, or saved to a file."""
    from saltern.admin.v1.credentials_pb2 import ApiKey, CreateApiKeyRequest, Role
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    api_key = ApiKey(
        display_name=display_name,
        role=Role.Value("ROLE_" + role.upper().replace("-", "_")),
        project_id=project,
        user_id=user,
        node_id=node_id or "",
    )
    if expires_in is not None:
        api_key.expire_time.FromDatetime((datetime.now(UTC) + expires_in).replace(tzinfo=None))
    request = CreateApiKeyRequest(
        parent="" if role in _PLATFORM_ROLES and tenant_id is None else _parent(admin, tenant_id),
        api_key_id=key_id,
        api_key=api_key,
        request_id=new_request_id(),
    )
    with secret_file(save) as write:
        response = admin.call(admin.credentials.CreateApiKey, request)
        write(response.secret)
    if settings_of(ctx).json:
        shown = message_dict(response)
        if save is not None:
            del shown["secret"]
        print_json(shown)
    elif save is not None:
        say(f"created {response.api_key.name} ({role}); its secret is in {save}", err=True)
    else:
        say(f"created {response.api_key.name} ({role}); its secret is shown this once:", err=True)
        say(response.secret)


@key.command("rotate")
@click.argument("key_id", metavar="KEY", type=API_KEY_ID)
@_tenant_option
@click.option("--overlap", type=DURATION, help="How long the old secret stays good, 1h to 30d. [24h]")
@click.option("--no-overlap", is_flag=True, help="End the old secret and its tokens at once.")
@click.option("--end-previous", is_flag=True, help="End what is left of an earlier rotation's overlap.")
@click.option("--expires-in", type=DURATION, help="When the key expires from now on, such as 90d; else as before.")
@click.option("--save", type=_FILE, metavar="FILE", help="Write the secret to FILE (mode 0600) instead of showing it.")
@yes_option
@wait_option
@click.pass_context
def rotate(
    ctx: click.Context,
    *,
    key_id: str,
    tenant_id: TenantId | None,
    overlap: timedelta | None,
    no_overlap: bool,
    end_previous: bool,
    expires_in: timedelta | None,
    save: Path | None,
    yes: bool,
) -> None:
    """Give an API key a new secret at once; the old one stays good for the overlap.

    Move whoever uses the key over to the new secret meanwhile; `saltern key list` shows when each was last used.

    \b
    saltern key rotate ci --save ci.key.new
    saltern key rotate ci --no-overlap --end-previous   (both old ones may be known to others)
    """
    from saltern.admin.v1.credentials_pb2 import RotateApiKeyRequest
    from saltern.admin_client import new_request_id

    if no_overlap and overlap is not None:
        raise click.UsageError("--overlap and --no-overlap exclude each other")
    admin = connect(ctx)
    owner = tenant_id or TenantId(admin.tenant_id)
    name = api_key_name(owner or None, ApiKeyId(key_id))
    if no_overlap or end_previous:
        confirm(yes, f"End a secret of {name} now? Whoever uses it loses access.")
    request = RotateApiKeyRequest(name=name, end_previous=end_previous, request_id=new_request_id())
    if no_overlap or overlap is not None:
        request.overlap.FromTimedelta(overlap or timedelta(0))
    if expires_in is not None:
        request.expire_time.FromDatetime((datetime.now(UTC) + expires_in).replace(tzinfo=None))
    with secret_file(save) as write:
        response = admin.call(admin.credentials.RotateApiKey, request)
        write(response.secret)
    previous = response.api_key.previous
    old = f"the old one is good until {local_time(previous.expire_time)}" if previous.lookup else "the old one is void"
    if settings_of(ctx).json:
        shown = message_dict(response)
        if save is not None:
            del shown["secret"]
        print_json(shown)
    elif save is not None:
        say(f"rotated {name}; its new secret is in {save}, {old}", err=True)
    else:
        say(f"rotated {name}; {old}; its new secret is shown this once:", err=True)
        say(response.secret)


@key.command("redeem-bootstrap")
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="The file bootstrap-token that the first start of the control plane wrote to its state directory.",
)
@click.option("--save", type=_FILE, metavar="FILE", required=True, help="Write the secret to FILE (mode 0600).")
@click.option("--key-id", type=API_KEY_ID, help="Name of the key; bootstrap-admin by default.")
@click.pass_context
def redeem_bootstrap(ctx: click.Context, token_file: Path, save: Path, key_id: str | None) -> None:
    """Redeem the one-time bootstrap token of a fresh deployment for the first platform administrator's key.

    Needs --control and no API key.
    """
    from saltern.admin_client import redeem_bootstrap_token

    settings = settings_of(ctx)
    if settings.control is None:
        raise click.UsageError("name the fresh control plane: --control HOST:PORT")
    bootstrap_token = token_file.read_text(encoding="utf-8", errors="replace").strip()
    with secret_file(save) as write:
        response = redeem_bootstrap_token(
            settings.control, bootstrap_token, key_id or "", deadline_ms=settings.deadline_ms, tls=settings.tls
        )
        write(response.secret)
    if settings.json:
        print_json({"apiKeyName": response.api_key_name})
    else:
        say(f"created {response.api_key_name} (platform-admin); its secret is in {save}", err=True)


@key.command("list")
@_tenant_option
@click.pass_context
def list_keys(ctx: click.Context, tenant_id: TenantId | None) -> None:
    """List API keys, without their secrets: nobody has those.

    SECRET is what stands after sk-saltern- in it. A rotated key has a second line while its old secret is good.
    BOUND TO is what every salt of the key is narrowed to, or the node that it is for.
    """
    from saltern.admin.v1.credentials_pb2 import ListApiKeysRequest, Role

    admin = connect(ctx)
    request = ListApiKeysRequest(parent=_parent(admin, tenant_id))
    keys: list[ApiKey] = list(admin.iterate(admin.credentials.ListApiKeys, request, "api_keys"))
    table = Table("KEY", "ROLE", "DISPLAY NAME", "SECRET", "CREATED", "EXPIRES", "LAST USED", "BOUND TO")
    for item in keys:
        table.add(
            item.name.rpartition("/")[2],
            enum_word(Role, item.role, "ROLE_"),
            item.display_name,
            item.lookup,
            local_time(item.rotate_time) or local_time(item.create_time),
            local_time(item.expire_time) or "never",
            local_time(item.last_used_time),
            ", ".join(
                f"{what} {name}"
                for what, name in (("project", item.project_id), ("user", item.user_id), ("node", item.node_id))
                if name
            ),
        )
        if item.HasField("previous"):
            expires, last_used = local_time(item.previous.expire_time), local_time(item.previous.last_used_time)
            table.add("", "", "(before its rotation)", item.previous.lookup, "", expires, last_used, "")
    print_messages(settings_of(ctx), "apiKeys", keys, table)


@key.command("delete")
@click.argument("key_id", metavar="KEY", type=API_KEY_ID)
@_tenant_option
@yes_option
@wait_option
@click.pass_context
def delete(ctx: click.Context, key_id: str, tenant_id: TenantId | None, yes: bool) -> None:
    """Delete an API key: no new token is issued for it, and those that it has end at once."""
    from saltern.admin.v1.credentials_pb2 import DeleteApiKeyRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    owner = tenant_id or TenantId(admin.tenant_id)
    name = api_key_name(owner or None, ApiKeyId(key_id))
    confirm(yes, f"Delete {name}? Whoever uses it loses access.")
    admin.call(admin.credentials.DeleteApiKey, DeleteApiKeyRequest(name=name, request_id=new_request_id()))
    if settings_of(ctx).json:
        print_json({})
    else:
        say(f"deleted {name}")


@key.command("revoke")
@click.argument("key_id", metavar="KEY", type=API_KEY_ID)
@_tenant_option
@yes_option
@wait_option
@click.pass_context
def revoke(ctx: click.Context, key_id: str, tenant_id: TenantId | None, yes: bool) -> None:
    """End every token of an API key at once, on every node; the key stays, and its next token is good."""
    admin = connect(ctx)
    owner = tenant_id or TenantId(admin.tenant_id)
    revoke_key_tokens(ctx, admin, api_key_name(owner or None, ApiKeyId(key_id)), yes=yes)


def _parent(admin: AdminClient, tenant_id: TenantId | None) -> str:
    """The resource that owns the keys: the named tenant, else that of the key in use, else the platform ("")."""
    owner = tenant_id or TenantId(admin.tenant_id)
    return tenant_name(owner) if owner else ""


@token.command("issue")
@click.option("--namespace", "namespace_id", type=NAMESPACE, help="A token for cache nodes, narrowed to NAMESPACE.")
@click.option("--project", type=TEXT, default="", help="Narrow the salt keys to this project.")
@click.option("--user", type=TEXT, default="", help="Narrow the salt keys to this user.")
@click.option("--session", type=TEXT, default="", help="Narrow the salt keys to this session.")
@click.option("--show", is_flag=True, help="Print the token (with JSON also the salt keys): it is a credential.")
@click.option("--save", type=_FILE, metavar="FILE", help="Write the whole answer, secrets included, as JSON (0600).")
@click.pass_context
def issue(
    ctx: click.Context,
    *,
    namespace_id: NamespaceId | None,
    project: str,
    user: str,
    session: str,
    show: bool,
    save: Path | None,
) -> None:
    """Issue a token for another tool: for cache nodes with --namespace, else for the control plane.

    Without --show only what goes with the token is printed. `saltern token issue --show` prints the token alone.
    """
    from saltern.auth.v1.auth_pb2 import AUDIENCE_CONTROL, AUDIENCE_NODE

    admin, settings = connect(ctx), settings_of(ctx)
    with secret_file(save) as write:
        response = admin.exchange(
            AUDIENCE_NODE if namespace_id else AUDIENCE_CONTROL,
            namespace_id=namespace_id or "",
            narrowing=Narrowing(project, user, session),
        )
        write(json.dumps(message_dict(response)))
    if settings.json:
        shown = message_dict(response)
        if not show:
            del shown["accessToken"]
            del shown["saltKeys"]
        print_json(shown)
    elif show:
        say(response.access_token)
    else:
        table = Table()
        table.add("audience", "node" if namespace_id else "control")
        table.add("tenant", response.tenant_id or "(platform)")
        table.add("namespace", namespace_id)
        table.add("expires", local_time(response.expire_time))
        table.add("salt epochs", ", ".join(str(salt.epoch) for salt in response.salt_keys))
        table.add("nodes", ", ".join(endpoint.wire_endpoint for endpoint in response.nodes))
        table.add("token", f"in {save}" if save else "(not shown: pass --show or --save FILE)")
        table.print(settings)
