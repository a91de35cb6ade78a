"""``saltern key-encryption-key``: what secrets are wrapped under in the database, and its rotation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from saltern.cli.confirmation import confirm, yes_option
from saltern.cli.failure import say
from saltern.cli.parameters import DURATION
from saltern.cli.render import Table, enum_word, local_time, print_message, print_messages
from saltern.cli.settings import Group, settings_of
from saltern.cli.stack import connect
from saltern.errors import DeadlineExceededError

if TYPE_CHECKING:
    from datetime import timedelta

    from saltern.admin.v1.key_encryption_keys_pb2 import KeyEncryptionKey, ListKeyEncryptionKeysResponse
    from saltern.admin_client import AdminClient

_LOOK_EVERY_S: Final = 0.5


@click.group("key-encryption-key", cls=Group)
def key_encryption_key() -> None:
    """Rotate the keys that root secrets and private keys are wrapped under (platform-admin)."""


@key_encryption_key.command("list")
@click.pass_context
def list_keys(ctx: click.Context) -> None:
    """List the keys, newest first, with what is wrapped under each: the progress of a rotation."""
    admin = connect(ctx)
    answer = _list(admin)
    table = Table("ID", "STATE", "WRAPPED", "SEALED BY", "USED SINCE", "RETIRED", "WAITS FOR", right=("WRAPPED",))
    for item in answer.encryption_keys:
        missing = f"{item.missing_holders} of {answer.holders} control planes" if item.missing_holders else ""
        table.add(
            item.id,
            _state(item),
            str(_wrapped(item)),
            item.sealed_by or "file",
            local_time(item.use_time) or "not yet",
            local_time(item.retire_time),
            missing,
        )
    print_messages(settings_of(ctx), "keyEncryptionKeys", list(answer.encryption_keys), table)


@key_encryption_key.command("rotate")
@click.option("--wait", is_flag=True, help="Show the progress until nothing is under another key.")
@click.option("--timeout", type=DURATION, default="10m", show_default=True, help="Of --wait.")
@click.pass_context
def rotate(ctx: click.Context, *, wait: bool, timeout: timedelta) -> None:
    """Begin to use a new key, and wrap everything anew under it.

    Where keys lie in a file, append the new one to it on every host first; where a key management service seals them,
    it seals a new one. The rest goes on by itself: the new key is used once every control plane holds it, the old one
    retires, what is under it is wrapped anew. When nothing is left under it, remove it.

    \b
    openssl rand -hex 32 >> /var/lib/saltern/control/key-encryption-key    # on every host of a control plane
    saltern key-encryption-key rotate --wait
    saltern key-encryption-key remove 91c2e8b07f5d4a36
    """
    from saltern.admin.v1.key_encryption_keys_pb2 import RotateKeyEncryptionKeyRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    request = RotateKeyEncryptionKeyRequest(request_id=new_request_id())
    made = admin.call(admin.key_encryption_keys.RotateKeyEncryptionKey, request)
    if wait:
        made = _wait(admin, made.id, timeout.total_seconds())
    rows = [("id", made.id), ("state", _state(made)), ("sealed by", made.sealed_by or "file")]
    print_message(settings_of(ctx), made, rows)


@key_encryption_key.command("remove")
@click.argument("key_id", metavar="ID")
@yes_option
@click.pass_context
def remove(ctx: click.Context, *, key_id: str, yes: bool) -> None:
    """Give up a retired key for ever; refused while anything is wrapped under it.

    A key that a key management service has sealed is destroyed with that. One of a file can be deleted from it, on
    every host: nothing is under it, and the database refuses whatever would be wrapped with it again. Backups of the
    database from before the rotation need it still.
    """
    from saltern.admin.v1.key_encryption_keys_pb2 import RemoveKeyEncryptionKeyRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    confirm(yes, f"Give up the key-encryption key {key_id} for ever? Older backups need it still.")
    request = RemoveKeyEncryptionKeyRequest(id=key_id, request_id=new_request_id())
    removed = admin.call(admin.key_encryption_keys.RemoveKeyEncryptionKey, request)
    rows = [("id", removed.id), ("state", _state(removed)), ("secrets under it", str(_wrapped(removed)))]
    print_message(settings_of(ctx), removed, rows)


def _wait(admin: AdminClient, key_id: str, timeout_s: float) -> KeyEncryptionKey:
    """Until ``key_id`` is current and nothing is under another key; says on stderr how far it is."""
    from saltern.admin.v1.key_encryption_keys_pb2 import KeyEncryptionKey

    ends_s, said = time.monotonic() + timeout_s, ""
    while True:
        answer = _list(admin)
        made = next(item for item in answer.encryption_keys if item.id == key_id)
        left = sum(_wrapped(item) for item in answer.encryption_keys if item.id != key_id)
        settled = not any(item.state == KeyEncryptionKey.STATE_RETIRING for item in answer.encryption_keys)
        if made.state == KeyEncryptionKey.STATE_CURRENT and settled and not left:
            return made
        waiting = f", {made.missing_holders} control planes do not hold it yet" if made.missing_holders else ""
        progress = f"{key_id} is {_state(made)}{waiting}; {left} secrets are under other keys"
        if progress != said:
            say(progress, err=True)
            said = progress
        if time.monotonic() >= ends_s:
            raise DeadlineExceededError(
                f"the rotation to the key {key_id} is not done: {left} secrets are under other keys",
                reason="ROTATION_NOT_DONE",
                hint="it goes on by itself; `saltern key-encryption-key list` says what it waits for",
            )
        time.sleep(_LOOK_EVERY_S)


def _list(admin: AdminClient) -> ListKeyEncryptionKeysResponse:
    from saltern.admin.v1.key_encryption_keys_pb2 import ListKeyEncryptionKeysRequest

    return admin.call(admin.key_encryption_keys.ListKeyEncryptionKeys, ListKeyEncryptionKeysRequest())


def _state(item: KeyEncryptionKey) -> str:
    return enum_word(item.State, item.state, "STATE_")


def _wrapped(item: KeyEncryptionKey) -> int:
    return sum(of_table.count for of_table in item.wrapped)
