"""``saltern token keys | rotate-signing-key | revoke | revocations``: what makes tokens good, and what ends them."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from saltern.cli.confirmation import confirm, yes_option
from saltern.cli.failure import say
from saltern.cli.parameters import API_KEY_ID, TENANT, TEXT
from saltern.cli.render import Table, enum_word, local_time, print_message, print_messages
from saltern.cli.settings import Group, settings_of
from saltern.cli.stack import connect
from saltern.cli.waiting import wait_option
from saltern.errors import InvalidArgumentError
from saltern.names import ApiKeyId, TenantId, api_key_name, tenant_name

if TYPE_CHECKING:
    from saltern.admin.v1.tokens_pb2 import SigningKey, TokenRevocation
    from saltern.admin_client import AdminClient

_TOKEN_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_TOKEN_FILE_MAX_BYTES: Final = 8192
_tenant_option = click.option(
    "--tenant",
    "tenant_id",
    type=TENANT,
    help="Whose tokens; by default the tenant of the key you use, for a platform key: the platform.",
)


@click.group(cls=Group)
def token() -> None:
    """Issue short-lived tokens, end them, and rotate the keys that sign them."""


@token.command("keys")
@click.pass_context
def keys(ctx: click.Context) -> None:
    """List the keys that sign tokens (platform-admin).

    A key is first published, so that every node comes to know it; then it signs; then it retires until the last token
    that it signed has expired, and is gone.
    """
    from saltern.admin.v1.tokens_pb2 import ListSigningKeysRequest, SigningKey

    admin = connect(ctx)
    found: list[SigningKey] = list(admin.call(admin.tokens.ListSigningKeys, ListSigningKeysRequest()).signing_keys)
    table = Table("KID", "STATE", "PUBLISHED", "SIGNS SINCE", "RETIRED", "GOOD UNTIL")
    for key in found:
        table.add(
            key.kid,
            enum_word(SigningKey.State, key.state, "STATE_"),
            local_time(key.create_time),
            local_time(key.sign_time) or "not yet",
            local_time(key.retire_time),
            local_time(key.not_after_time),
        )
    print_messages(settings_of(ctx), "signingKeys", found, table)


@token.command("rotate-signing-key")
@click.option("--now", is_flag=True, help="Emergency: withdraw every other key at once; all tokens there are die.")
@yes_option
@wait_option
@click.pass_context
def rotate_signing_key(ctx: click.Context, now: bool, yes: bool) -> None:
    """Begin to use a new key for signing tokens (platform-admin).

    Without --now nobody notices: the new key signs once every node holds it, and tokens of the old one stay good until
    they expire. With --now, for a key that may have leaked, every token is refused by the control plane at once and by
    every node within a moment; clients exchange their API keys again by themselves.
    """
    from saltern.admin.v1.tokens_pb2 import RotateSigningKeyRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    if now:
        confirm(yes, "Withdraw every signing key at once? All tokens of all tenants are refused from then on.")
    request = RotateSigningKeyRequest(withdraw_now=now, request_id=new_request_id())
    _print_key(ctx, admin.call(admin.tokens.RotateSigningKey, request))


@token.command("revoke")
@click.argument("token_id", required=False, type=TEXT)
@click.option("--token-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The token to end.")
@click.option("--key", "key_id", type=API_KEY_ID, help="End every token of this API key; the key stays.")
@click.option("--all", "every", is_flag=True, help="End every token of the tenant; its API keys stay.")
@_tenant_option
@yes_option
@wait_option
@click.pass_context
def revoke(
    ctx: click.Context,
    *,
    token_id: str | None,
    token_file: Path | None,
    key_id: str | None,
    every: bool,
    tenant_id: TenantId | None,
    yes: bool,
) -> None:
    """End tokens before they expire: one by its id (the claim jti), one in a file, those of a key, or all.

    \b
    saltern token revoke 9f2c4be01a77d3c5e6b8a1f00d4c2e93
    saltern token revoke --token-file leaked.jwt
    saltern token revoke --key ci --tenant acme
    saltern token revoke --all --tenant acme
    """
    if sum((token_id is not None, token_file is not None, key_id is not None, every)) != 1:
        raise click.UsageError("name what to end, once: TOKEN_ID, --token-file, --key or --all")
    admin = connect(ctx)
    owner = tenant_id or TenantId(admin.tenant_id)
    if every:
        revoke_tenant_tokens(ctx, admin, owner, yes=yes)
    elif key_id is not None:
        revoke_key_tokens(ctx, admin, api_key_name(owner or None, ApiKeyId(key_id)), yes=yes)
    else:
        from saltern.admin.v1.tokens_pb2 import RevokeTokenRequest
        from saltern.admin_client import new_request_id

        # The token itself stays here: its id is enough to end it.
        ended = token_id if token_file is None else _token_id_in(token_file)
        request = RevokeTokenRequest(
            parent=tenant_name(owner) if owner else "", token_id=ended or "", request_id=new_request_id()
        )
        confirm(yes, f"End the token {ended}?")
        _print_revocation(ctx, admin.call(admin.tokens.RevokeToken, request))


@token.command("revocations")
@_tenant_option
@click.pass_context
def revocations(ctx: click.Context, tenant_id: TenantId | None) -> None:
    """List the revocations in force; each is forgotten when the last token that it names has expired."""
    from saltern.admin.v1.tokens_pb2 import ListTokenRevocationsRequest

    admin = connect(ctx)
    owner = tenant_id or TenantId(admin.tenant_id)
    request = ListTokenRevocationsRequest(parent=tenant_name(owner) if owner else "")
    found: list[TokenRevocation] = list(admin.iterate(admin.tokens.ListTokenRevocations, request, "revocations"))
    table = Table("TOKEN ID", "NAMES", "ISSUED BEFORE", "REVOKED", "FORGOTTEN")
    for item in found:
        table.add(
            item.token_id_prefix,
            "one token" if _TOKEN_ID.fullmatch(item.token_id_prefix) else "an API key's tokens",
            local_time(item.issued_before_time) or "ever",
            local_time(item.revoke_time),
            local_time(item.expire_time),
        )
    print_messages(settings_of(ctx), "revocations", found, table)


def revoke_key_tokens(ctx: click.Context, admin: AdminClient, name: str, *, yes: bool) -> None:
    """End every token of one API key."""
    from saltern.admin.v1.tokens_pb2 import RevokeApiKeyTokensRequest
    from saltern.admin_client import new_request_id

    confirm(yes, f"End every token of {name}? Whoever has the key gets new ones.")
    request = RevokeApiKeyTokensRequest(name=name, request_id=new_request_id())
    _print_revocation(ctx, admin.call(admin.tokens.RevokeApiKeyTokens, request))


def revoke_tenant_tokens(ctx: click.Context, admin: AdminClient, tenant_id: TenantId, *, yes: bool) -> None:
    """End every token of one tenant."""
    from saltern.admin.v1.tokens_pb2 import RevokeTenantTokensRequest
    from saltern.admin_client import new_request_id

    if not tenant_id:
        raise click.UsageError("name the tenant: --tenant TENANT (of the platform: `token rotate-signing-key --now`)")
    confirm(yes, f"End every token of tenant {tenant_id}? Its clients exchange their API keys again.")
    request = RevokeTenantTokensRequest(name=tenant_name(tenant_id), request_id=new_request_id())
    tenant = admin.call(admin.tokens.RevokeTenantTokens, request)
    if settings_of(ctx).json:
        print_message(settings_of(ctx), tenant, [])
    else:
        say(f"ended every token of {tenant.name}")


def _token_id_in(file: Path) -> str:
    """The claim jti of the token in ``file``, which is not verified: a revocation harms nobody but its owner."""
    with file.open("rb") as opened:
        parts = opened.read(_TOKEN_FILE_MAX_BYTES).strip().split(b".")
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + b"=" * (-len(parts[1]) % 4)))
        token_id = str(claims["jti"])
    except (IndexError, ValueError, KeyError, TypeError, RecursionError):
        token_id = ""
    if _TOKEN_ID.fullmatch(token_id) is None:
        raise InvalidArgumentError(
            f"the file {str(file)!r} does not hold a token of Saltern's",
            reason="INVALID_TOKEN_FILE",
            hint="it must hold the token as `saltern token issue --show` printed it, and nothing else",
        )
    return token_id


def _print_key(ctx: click.Context, key: SigningKey) -> None:
    from saltern.admin.v1.tokens_pb2 import SigningKey

    rows = [
        ("kid", key.kid),
        ("state", enum_word(SigningKey.State, key.state, "STATE_")),
        ("in the policy from version", str(key.publish_version)),
        ("signs since", local_time(key.sign_time) or "not yet: once every node holds it (`saltern token keys`)"),
    ]
    print_message(settings_of(ctx), key, rows)


def _print_revocation(ctx: click.Context, item: TokenRevocation) -> None:
    if not settings_of(ctx).json and item.widened_to_tenant:
        say("so many tokens were revoked lately that every token of the tenant was ended instead", err=True)
    rows = [
        ("token id", item.token_id_prefix),
        ("issued before", local_time(item.issued_before_time) or "ever"),
        ("forgotten", local_time(item.expire_time)),
    ]
    print_message(settings_of(ctx), item, rows)
