"""The credentials of an embedded stack: made once, kept as files (0600) beside its data.

``admin.key`` administers the platform; each node has a key of its own that is good for that node alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from controlplane.files import write_private_file
from saltern.admin.v1 import credentials_pb2
from saltern.admin_client import AdminClient, read_api_key, redeem_bootstrap_token
from saltern.auth.v1 import auth_pb2
from saltern.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError, UnauthenticatedError
from saltern.names import ApiKeyId, NodeId, api_key_name
from saltern.tls import ClientTls

ADMIN_KEY_FILE: Final = "admin.key"
#: Of stacks before keys were bound to nodes: one for all of them.
_SHARED_KEY_FILE: Final = "node.key"
_SHARED_KEY_ID: Final = ApiKeyId("embedded-node")
_DEADLINE_MS: Final = 30_000


def node_key_file(credentials_dir: Path, node: NodeId) -> Path:
    """Where the key of ``node`` is kept."""
    return credentials_dir / f"{node}.key"


def ensure_credentials(
    endpoint: str,
    bootstrap_token_file: Path,
    credentials_dir: Path,
    nodes: Iterable[NodeId],
    *,
    tls: ClientTls | None = None,
) -> None:
    """Make what is missing of the administrator's key and those of ``nodes``, and check the others.

    Over TLS with ``tls``, else in plain text.

    Raises:
        FailedPreconditionError: ADMIN_KEY_LOST: the deployment was set up before and its admin key is not here.
        SalternError: the control plane refuses or cannot be reached.
    """
    admin_key_file = credentials_dir / ADMIN_KEY_FILE
    if not admin_key_file.exists():
        write_private_file(admin_key_file, _redeem(endpoint, bootstrap_token_file, admin_key_file, tls) + "\n")
    with AdminClient(endpoint, read_api_key(admin_key_file), tls=tls) as admin:
        try:
            admin.exchange(auth_pb2.AUDIENCE_CONTROL)
        except UnauthenticatedError:
            raise _admin_key_lost(admin_key_file, "does not open this deployment") from None
        for node in nodes:
            key_file = node_key_file(credentials_dir, node)
            if not _is_valid(endpoint, key_file, tls):
                write_private_file(key_file, _create_node_key(admin, node) + "\n")
        shared_key_file = credentials_dir / _SHARED_KEY_FILE
        if shared_key_file.exists():
            with suppress(NotFoundError):
                _delete_key(admin, _SHARED_KEY_ID)
            shared_key_file.unlink()


def _redeem(endpoint: str, bootstrap_token_file: Path, admin_key_file: Path, tls: ClientTls | None) -> str:
    try:
        token = bootstrap_token_file.read_text().strip()
    except FileNotFoundError:
        raise _admin_key_lost(admin_key_file, "is missing, and the bootstrap token was redeemed before") from None
    return redeem_bootstrap_token(endpoint, token, deadline_ms=_DEADLINE_MS, tls=tls).secret


def _is_valid(endpoint: str, key_file: Path, tls: ClientTls | None) -> bool:
    if not key_file.exists():
        return False
    with AdminClient(endpoint, read_api_key(key_file), tls=tls) as client:
        try:
            client.exchange(auth_pb2.AUDIENCE_CONTROL)
        except UnauthenticatedError:
            return False
        return True


def _create_node_key(admin: AdminClient, node: NodeId) -> str:
    """A new key for a node of the stack; one whose secret was lost in a crash is replaced."""
    key_id = ApiKeyId(f"embedded-{node}")
    request = credentials_pb2.CreateApiKeyRequest(
        api_key_id=key_id,
        api_key=credentials_pb2.ApiKey(
            role=credentials_pb2.ROLE_NODE, display_name="node of the embedded stack", node_id=node
        ),
    )
    try:
        return admin.call(admin.credentials.CreateApiKey, request).secret
    except AlreadyExistsError:
        _delete_key(admin, key_id)
        return admin.call(admin.credentials.CreateApiKey, request).secret


def _delete_key(admin: AdminClient, key_id: ApiKeyId) -> None:
    request = credentials_pb2.DeleteApiKeyRequest(name=api_key_name(None, key_id))
    admin.call(admin.credentials.DeleteApiKey, request)


def _admin_key_lost(admin_key_file: Path, what: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"the admin key {admin_key_file} {what}",
        reason="ADMIN_KEY_LOST",
        hint="restore it from a backup, or begin with an empty --data-dir",
    )
