"""A thin client of the control plane: one channel, a token that renews itself, deadlines and errors of the tree.

    with AdminClient("127.0.0.1:7700", read_api_key(path)) as admin:
        tenant = admin.call(admin.tenants.GetTenant, GetTenantRequest(name="tenants/alpha"))
        for tenant in admin.iterate(admin.tenants.ListTenants, ListTenantsRequest(), "tenants"):
            ...

Requests and answers are the messages of ``proto/saltern/admin/v1``; nothing is wrapped twice.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import grpc
from google.protobuf.message import Message

from saltern import rpc_tls
from saltern.admin.v1 import (
    audit_pb2_grpc,
    credentials_pb2_grpc,
    key_encryption_keys_pb2_grpc,
    namespaces_pb2_grpc,
    nodes_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    quotas_pb2_grpc,
    salt_policies_pb2_grpc,
    sharing_groups_pb2_grpc,
    tenants_pb2_grpc,
    tokens_pb2_grpc,
    usage_pb2_grpc,
)
from saltern.auth.v1 import auth_pb2, auth_pb2_grpc
from saltern.endpoints import parse_endpoint
from saltern.errors import InvalidArgumentError, NotFoundError, PermissionDeniedError, UnauthenticatedError
from saltern.keys import NOT_NARROWED, Narrowing
from saltern.policy_version import WAIT_DEFAULT_S, read_policy_version
from saltern.rpc_errors import error_from_rpc

if TYPE_CHECKING:
    from saltern.admin.v1.audit_pb2_grpc import AuditServiceStub
    from saltern.admin.v1.credentials_pb2_grpc import CredentialServiceStub
    from saltern.admin.v1.key_encryption_keys_pb2_grpc import KeyEncryptionKeyServiceStub
    from saltern.admin.v1.namespaces_pb2_grpc import NamespaceServiceStub
    from saltern.admin.v1.nodes_pb2_grpc import NodesServiceStub
    from saltern.admin.v1.policy_pb2_grpc import PolicyServiceStub
    from saltern.admin.v1.quotas_pb2_grpc import QuotaServiceStub
    from saltern.admin.v1.salt_policies_pb2_grpc import SaltPolicyServiceStub
    from saltern.admin.v1.sharing_groups_pb2_grpc import SharingGroupServiceStub
    from saltern.admin.v1.tenants_pb2_grpc import TenantServiceStub
    from saltern.admin.v1.tokens_pb2_grpc import TokenServiceStub
    from saltern.admin.v1.usage_pb2_grpc import UsageServiceStub
    from saltern.tls import ClientTls

DEADLINE_DEFAULT_MS: Final = 10_000
PAGE_ITEMS: Final = 500
MESSAGE_MAX_BYTES: Final = 64 * 1024 * 1024
API_KEY_FILE_MAX_BYTES: Final = 4096
_API_KEY: Final = re.compile(r"sk-saltern-[0-9a-f]{16}-[A-Za-z0-9_-]{43}", re.ASCII)
#: A token is renewed when a tenth of its life is left.
_RENEW_AT: Final = 0.9

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


class ApiKey:
    """The secret of an API key; its repr and str never show it."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str) -> None:
        """Wrap ``secret``; raises InvalidArgumentError (INVALID_API_KEY) unless it has the form of an API key."""
        if not isinstance(secret, str) or _API_KEY.fullmatch(secret) is None:
            raise InvalidArgumentError(
                "the given API key does not have the form sk-saltern-...",
                reason="INVALID_API_KEY",
                hint="pass the secret exactly as `saltern key create` printed it",
            )
        self._secret = secret

    def __repr__(self) -> str:
        return "ApiKey(<secret>)"

    @property
    def lookup(self) -> str:
        """Which of all keys it is (``ApiKey.lookup`` of the service); proves nothing and may be shown."""
        return self._secret.split("-")[2]

    def reveal(self) -> str:
        """The secret itself, for the one call that sends it."""
        return self._secret


def read_api_key(path: Path) -> ApiKey:
    """Read an API key from a file that holds nothing else.

    Raises:
        NotFoundError: there is no such file. PermissionDeniedError: it cannot be read.
        InvalidArgumentError: its content is no API key; the message never shows the content.
    """
    try:
        with path.open("rb") as file:
            content = file.read(API_KEY_FILE_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(
            f"there is no API key file {str(path)!r}",
            reason="API_KEY_FILE_NOT_FOUND",
            hint="create a key with `saltern key create ... --save FILE` and pass --api-key-file FILE",
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PermissionDeniedError(
            f"cannot read the API key file {str(path)!r}: {reason}",
            reason="API_KEY_FILE_NOT_READABLE",
            hint="run as the user that owns the file, or name another with --api-key-file",
        ) from None
    try:
        return ApiKey(content.decode("ascii").strip())
    except (UnicodeDecodeError, InvalidArgumentError):
        raise InvalidArgumentError(
            f"the file {str(path)!r} does not hold an API key of the form sk-saltern-...",
            reason="INVALID_API_KEY",
            hint="the file must hold exactly the secret that `saltern key create` printed",
        ) from None


def new_request_id() -> str:
    """A fresh id for a changing request, so that a repetition of it changes nothing more (AIP-155)."""
    return str(uuid.uuid4())


def open_channel(endpoint: str, tls: ClientTls | None = None, *, server_name: str | None = None) -> grpc.Channel:
    """Open a channel that ignores proxy variables (a cache never sits behind an HTTP proxy) and service configs.

    Args:
        tls, server_name: see :func:`saltern.rpc_tls.open_channel`.
    """
    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.max_receive_message_length", MESSAGE_MAX_BYTES),
    ]
    return rpc_tls.open_channel(endpoint, tls, options, server_name=server_name)


def redeem_bootstrap_token(
    endpoint: str,
    token: str,
    api_key_id: str = "",
    *,
    deadline_ms: int = DEADLINE_DEFAULT_MS,
    tls: ClientTls | None = None,
) -> auth_pb2.RedeemBootstrapTokenResponse:
    """Redeem the one-time token of a fresh deployment for its first platform-admin key.

    Raises:
        UnauthenticatedError: BOOTSTRAP_TOKEN_INVALID: wrong, or redeemed already.
        SalternError: the control plane refuses or cannot be reached.
    """
    request = auth_pb2.RedeemBootstrapTokenRequest(bootstrap_token=token, api_key_id=api_key_id)
    with open_channel(str(parse_endpoint(endpoint, what="control endpoint", port_min=1)), tls) as channel:
        try:
            return auth_pb2_grpc.AuthServiceStub(channel).RedeemBootstrapToken(request, timeout=deadline_ms / 1000)
        except grpc.RpcError as error:
            raise error_from_rpc(error, endpoint=endpoint) from None


class AdminClient:
    """Calls the control plane as the owner of one API key. Thread-safe; close it, or use it as a context manager.

    Args:
        endpoint: ``host:port`` of the control plane.
        api_key: exchanged for a control token on the first call and again before that expires.
        deadline_ms: for each call, unless the call names another.
        tls: whom to trust at the other end; None for plain text. Raises SalternError if its files cannot be used.
    """

    def __init__(
        self,
        endpoint: str,
        api_key: ApiKey,
        *,
        deadline_ms: int = DEADLINE_DEFAULT_MS,
        tls: ClientTls | None = None,
    ) -> None:
        self.endpoint = str(parse_endpoint(endpoint, what="control endpoint", port_min=1))
        self._api_key = api_key
        self._deadline_ms = deadline_ms
        self._channel = open_channel(endpoint, tls)
        self._auth = auth_pb2_grpc.AuthServiceStub(self._channel)
        self._session: auth_pb2.ExchangeApiKeyResponse | None = None
        #: The newest policy that a change made with this client was answered with; 0 before any.
        self.policy_version = 0
        self._renew_at_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    @property
    def channel(self) -> grpc.Channel:
        return self._channel

    @cached_property
    def tenants(self) -> TenantServiceStub:
        return tenants_pb2_grpc.TenantServiceStub(self._channel)

    @cached_property
    def namespaces(self) -> NamespaceServiceStub:
        return namespaces_pb2_grpc.NamespaceServiceStub(self._channel)

    @cached_property
    def quotas(self) -> QuotaServiceStub:
        return quotas_pb2_grpc.QuotaServiceStub(self._channel)

    @cached_property
    def salt_policies(self) -> SaltPolicyServiceStub:
        return salt_policies_pb2_grpc.SaltPolicyServiceStub(self._channel)

    @cached_property
    def credentials(self) -> CredentialServiceStub:
        return credentials_pb2_grpc.CredentialServiceStub(self._channel)

    @cached_property
    def tokens(self) -> TokenServiceStub:
        return tokens_pb2_grpc.TokenServiceStub(self._channel)

    @cached_property
    def audit(self) -> AuditServiceStub:
        return audit_pb2_grpc.AuditServiceStub(self._channel)

    @cached_property
    def key_encryption_keys(self) -> KeyEncryptionKeyServiceStub:
        return key_encryption_keys_pb2_grpc.KeyEncryptionKeyServiceStub(self._channel)

    @cached_property
    def usage(self) -> UsageServiceStub:
        return usage_pb2_grpc.UsageServiceStub(self._channel)

    @cached_property
    def nodes(self) -> NodesServiceStub:
        return nodes_pb2_grpc.NodesServiceStub(self._channel)

    @cached_property
    def sharing_groups(self) -> SharingGroupServiceStub:
        return sharing_groups_pb2_grpc.SharingGroupServiceStub(self._channel)

    @cached_property
    def policy(self) -> PolicyServiceStub:
        return policy_pb2_grpc.PolicyServiceStub(self._channel)

    def wait_for_policy(
        self, version: int | None = None, *, timeout_s: float = WAIT_DEFAULT_S
    ) -> policy_pb2.WaitForPolicyResponse:
        """Wait until no node can go by a policy older than ``version`` any more; by default the last change's.

        Args:
            version: as :attr:`policy_version` was after a change; 0 for the newest there is. It is a plain number that
                may be passed on to another process.
            timeout_s: at most :data:`saltern.policy_version.WAIT_MAX_S`.

        Raises:
            DeadlineExceededError: POLICY_NOT_EVERYWHERE: some node is late. The change is made all the same.
            InvalidArgumentError: POLICY_VERSION_UNKNOWN.
        """
        request = policy_pb2.WaitForPolicyRequest(version=self.policy_version if version is None else version)
        request.timeout.FromMilliseconds(round(timeout_s * 1000))
        deadline_ms = round(timeout_s * 1000) + self._deadline_ms
        return self.call(self.policy.WaitForPolicy, request, deadline_ms=deadline_ms)

    def exchange(
        self,
        audience: auth_pb2.Audience.ValueType,
        *,
        namespace_id: str = "",
        narrowing: Narrowing = NOT_NARROWED,
        deadline_ms: int | None = None,
    ) -> auth_pb2.ExchangeApiKeyResponse:
        """Exchange the API key for a token of ``audience``; for nodes also the salt keys of ``namespace_id``.

        Args:
            narrowing: what the salt keys are narrowed to, besides what the API key is bound to.
        """
        request = auth_pb2.ExchangeApiKeyRequest(
            api_key=self._api_key.reveal(),
            audience=audience,
            namespace_id=namespace_id,
            project_id=narrowing.project,
            user_id=narrowing.user,
            session_id=narrowing.session,
        )
        return self._invoke(self._auth.ExchangeApiKey, request, (), deadline_ms)

    def key_set(self) -> auth_pb2.KeySet:
        """The public keys that verify tokens; needs no token."""
        return self._invoke(self._auth.GetKeySet, auth_pb2.GetKeySetRequest(), (), None)

    @property
    def tenant_id(self) -> str:
        """The tenant of the API key; empty for a key of the platform. Exchanges the key if that has not happened."""
        return self._current_session(None).tenant_id

    def call(
        self,
        method: grpc.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        *,
        deadline_ms: int | None = None,
    ) -> ResponseT:
        """Call ``method`` with a valid token within the deadline.

        Raises:
            SalternError: whatever the control plane or the channel answered, decoded.
        """
        session = self._current_session(deadline_ms)
        try:
            return self._invoke(method, request, _bearer(session), deadline_ms)
        except UnauthenticatedError as error:
            # The token may have been revoked, or its key rotated away, since it was issued: one new one, one retry.
            if not error.reason.startswith("TOKEN_") and error.reason != "CREDENTIAL_REVOKED":
                raise
            self._session = None
        return self._invoke(method, request, _bearer(self._current_session(deadline_ms)), deadline_ms)

    def iterate(
        self,
        method: grpc.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        field: str,
        *,
        limit_items: int | None = None,
    ) -> Iterator[Any]:
        """Iterate over the items in ``field`` of every page, at most ``limit_items`` of them (AIP-158)."""
        left_items = limit_items
        while left_items is None or left_items > 0:
            page: RequestT = type(request)()
            page.CopyFrom(request)
            # Every list request has these two fields by AIP-158; protobuf has no common type to say so.
            page.page_size = min(PAGE_ITEMS, left_items or PAGE_ITEMS)  # type: ignore[attr-defined]
            response = self.call(method, page)
            items = list(getattr(response, field))[:left_items]
            yield from items
            left_items = None if left_items is None else left_items - len(items)
            next_page_token: str = response.next_page_token  # type: ignore[attr-defined]
            if not next_page_token:
                return
            request = page
            request.page_token = next_page_token  # type: ignore[attr-defined]

    def stream(
        self, method: grpc.UnaryStreamMultiCallable[RequestT, ResponseT], request: RequestT
    ) -> Iterator[ResponseT]:
        """Iterate over the answers of ``method``, for as long as they come: a stream has no deadline.

        Raises:
            SalternError: as :meth:`call`; also after some answers, when the stream breaks.
        """
        call = method(request, metadata=_bearer(self._current_session(None)))
        try:
            yield from call
        except grpc.RpcError as error:
            raise error_from_rpc(error, endpoint=self.endpoint) from None
        finally:
            call.cancel()

    def _current_session(self, deadline_ms: int | None) -> auth_pb2.ExchangeApiKeyResponse:
        session = self._session
        if session is None or time.monotonic() >= self._renew_at_s:
            started_s = time.monotonic()
            session = self.exchange(auth_pb2.AUDIENCE_CONTROL, deadline_ms=deadline_ms)
            lifetime_s = max(0.0, session.expire_time.ToMilliseconds() / 1000 - time.time())
            self._session, self._renew_at_s = session, started_s + lifetime_s * _RENEW_AT
        return session

    def _invoke(
        self,
        method: grpc.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        metadata: tuple[tuple[str, str], ...],
        deadline_ms: int | None,
    ) -> ResponseT:
        timeout_s = (self._deadline_ms if deadline_ms is None else deadline_ms) / 1000
        try:
            response, call = method.with_call(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise error_from_rpc(error, endpoint=self.endpoint) from None
        self.policy_version = max(self.policy_version, read_policy_version(call.trailing_metadata()))
        return response


def _bearer(session: auth_pb2.ExchangeApiKeyResponse) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {session.access_token}"),)
