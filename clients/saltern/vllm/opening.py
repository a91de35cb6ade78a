"""Opens the clients that an engine's options ask for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from saltern.vllm.options import ConnectorOptions
from saltern.vllm.request_tenancy import HandedCredentials, RequestTenancy
from saltern.vllm.tenancy import InstanceTenancy, Tenancy

if TYPE_CHECKING:
    from saltern.client import Client

#: For the first session with a node; a node that is not there is no reason to wait.
_FIRST_SESSION_MS: Final = 1000.0
#: To hear what a token is good for.
_EXCHANGE_MS: Final = 5000
#: Of a lookup's time may pass for the verification of a token that is seen for the first time.
_WAIT_PART: Final = 0.8


def open_tenancy(options: ConnectorOptions, environment: Mapping[str, str]) -> Tenancy:
    """The tenancy of an engine; in instance mode with its client, opened for ``open_wait_ms`` at most.

    Raises:
        SalternError: the key that seals tokens cannot be read (request mode).
    """
    if options.tenancy == "request":
        return _open_request_tenancy(options)

    def open_client() -> Client:
        return open_instance_client(options, environment)

    return InstanceTenancy(
        open_client,
        what=f"namespace {options.namespace!r} at {options.control}",
        require_cache_salt=options.require_cache_salt,
        wait_s=options.open_wait_ms / 1000,
    )


def _open_request_tenancy(options: ConnectorOptions) -> RequestTenancy:
    from saltern.client import Client
    from saltern.exchange import TokenGrant, exchange_token
    from saltern.tls import client_tls_from_environment
    from saltern.vllm.token_seal import TokenSeal

    tls = client_tls_from_environment()

    def exchange(token: str) -> TokenGrant:
        return exchange_token(options.control, token, timeout_ms=_EXCHANGE_MS, tls=tls)

    def open_client(credentials: HandedCredentials) -> Client:
        return Client.from_credentials(
            credentials, transport=options.transport, sessions_max=_sessions(options), tls=tls
        )

    return RequestTenancy(
        exchange,
        open_client,
        seal=TokenSeal.from_file(Path(options.seal_key_file)) if options.seal_key_file else None,
        accept_plain=options.plain_tokens,
        check_every_s=options.token_check_s,
        wait_ms=options.lookup_deadline_ms * _WAIT_PART,
    )


def open_instance_client(options: ConnectorOptions, environment: Mapping[str, str]) -> Client:
    """The client of the engine's own API key; reads the key's file, so that a new key is found at the next attempt.

    Raises:
        SalternError: the key cannot be read or exchanged.
    """
    from saltern.admin_client import ApiKey, read_api_key
    from saltern.client import Client
    from saltern.tls import client_tls_from_environment

    key = read_api_key(Path(options.api_key_file)) if options.api_key_file else ApiKey(environment["SALTERN_API_KEY"])
    client = Client(
        control=options.control,
        api_key=key.reveal(),
        namespace=options.namespace,
        project=options.project,
        sharing_group=options.sharing_group,
        transport=options.transport,
        sessions_max=_sessions(options),
        tls=client_tls_from_environment(),
    )
    client.ping(deadline_ms=_FIRST_SESSION_MS)  # connected before the first lookup, whose time is short
    return client


def _sessions(options: ConnectorOptions) -> int:
    """Connections to a node: each load, the saves and the lookups at the same time, without waiting for each other."""
    return options.load_threads + 5
