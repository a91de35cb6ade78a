"""TLS for gRPC: credentials of servers that follow their files, and channels of clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc

from saltern.rpc_tracing import traced

if TYPE_CHECKING:
    from saltern.tls import ClientTls, ServerMaterial
    from saltern.tls_reload import ReloadingTls

ChannelOptions = Sequence[tuple[str, Any]]

#: A peer that has vanished without a word (a cut line, a host without power) is noticed within so long of a call, and
#: the channel looks for another address of the same name. Without it calls would wait for TCP, a quarter of an hour.
#: Servers of ours let clients ask every five seconds.
_KEEPALIVE: ChannelOptions = (("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 3_000))


def server_credentials(tls: ReloadingTls) -> grpc.ServerCredentials:
    """Credentials of a gRPC server: each new connection gets the certificate of that moment, open ones go on."""
    shown = tls.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC, in a thread of its own, before each handshake; None for no change."""
        nonlocal shown
        material = tls.current()
        if material is shown:
            return None
        shown = material
        return _configuration(material)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown),
        fetch,  # type: ignore[arg-type]  # the stubs do not know that None means "no change"
        require_client_authentication=tls.requires_client_certificate,
    )


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Credentials of a channel; raises SalternError if a file cannot be used."""
    identity = tls.read_identity()
    return grpc.ssl_channel_credentials(
        root_certificates=tls.read_authorities(),
        private_key=None if identity is None else identity.private_key_pem,
        certificate_chain=None if identity is None else identity.chain_pem,
    )


def open_channel(
    endpoint: str, tls: ClientTls | None, options: ChannelOptions, *, server_name: str | None = None
) -> grpc.Channel:
    """A channel that is encrypted if and only if ``tls`` is given: it never falls back to plain text.

    Args:
        server_name: what the server's certificate must be for; None for what ``tls`` says, empty for the host called.

    Raises:
        SalternError: a file of ``tls`` cannot be used.
    """
    options = [*_KEEPALIVE, *options]
    if tls is None:
        return traced(grpc.insecure_channel(endpoint, options=options))
    named = _named(options, tls, server_name)
    return traced(grpc.secure_channel(endpoint, channel_credentials(tls), options=named))


def open_aio_channel(endpoint: str, tls: ClientTls | None, options: ChannelOptions) -> grpc.aio.Channel:
    """As :func:`open_channel`, for asyncio."""
    options = [*_KEEPALIVE, *options]
    if tls is None:
        return grpc.aio.insecure_channel(endpoint, options=options)
    return grpc.aio.secure_channel(endpoint, channel_credentials(tls), options=_named(options, tls, None))


def _named(options: ChannelOptions, tls: ClientTls, server_name: str | None) -> ChannelOptions:
    name = tls.server_name if server_name is None else server_name
    return [*options, ("grpc.ssl_target_name_override", name)] if name else options


def _configuration(material: ServerMaterial) -> grpc.ServerCertificateConfiguration:
    identity = material.identity
    return grpc.ssl_server_certificate_configuration(
        [(identity.private_key_pem, identity.chain_pem)], root_certificates=material.client_ca_pem
    )
