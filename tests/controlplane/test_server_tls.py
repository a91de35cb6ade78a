"""The control plane over mutual TLS, with a node that joins it: processes, real files, a reload under both."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography import x509

from saltern.admin.v1 import credentials_pb2, tenants_pb2
from saltern.admin_client import AdminClient, ApiKey, redeem_bootstrap_token
from saltern.auth.v1 import auth_pb2
from saltern.errors import UnavailableError
from saltern.tls import ClientTls, client_context
from tests.controlplane.test_server import serving, urls
from tests.support.certificates import Authority
from tests.support.control import migrate
from tests.support.served_node import serve_node


def shown(endpoint: str, tls: ClientTls) -> int:
    """The serial number of the certificate that a server shows now."""
    host, port = endpoint.rsplit(":", 1)
    context = client_context(tls)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), timeout=20) as raw,
        context.wrap_socket(raw, server_hostname=host) as sock,
    ):
        certificate = sock.getpeercert(binary_form=True)
    assert certificate is not None
    return x509.load_der_x509_certificate(certificate).serial_number


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def refuses(endpoint: str, tls: ClientTls | None) -> bool:
    with AdminClient(endpoint, ApiKey("sk-saltern-" + "0" * 16 + "-" + "A" * 43), tls=tls) as admin:
        try:
            admin.key_set()
        except UnavailableError:
            return True
    return False


async def test_a_node_joins_over_mutual_tls_and_both_take_new_certificates(postgres: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    tls, node_tls = authority.server("control"), authority.server("node")
    admin_tls = authority.client("admin")
    options = ["--tls-cert", str(tls.certificate), "--tls-key", str(tls.private_key)]
    options += ["--tls-client-ca", str(authority.ca)]
    with postgres.fresh_database(migrate) as database:
        with serving(tmp_path / "control", *options, **urls(database)) as served:
            endpoint = await asyncio.to_thread(served.wait_ready)
            token = (tmp_path / "control" / "bootstrap-token").read_text().strip()
            assert refuses(endpoint, None)
            assert refuses(endpoint, authority.client())
            assert not refuses(endpoint, admin_tls)
            secret = redeem_bootstrap_token(endpoint, token, tls=admin_tls).secret
            with AdminClient(endpoint, ApiKey(secret), tls=admin_tls) as admin:
                request = credentials_pb2.CreateApiKeyRequest(
                    api_key_id="node",
                    api_key=credentials_pb2.ApiKey(role=credentials_pb2.ROLE_NODE, node_id="node-1"),
                )
                node_secret = admin.call(admin.credentials.CreateApiKey, request).secret
                node_options = ["--tls-cert", str(node_tls.certificate), "--tls-key", str(node_tls.private_key)]
                node_options += ["--tls-client-ca", str(authority.ca), "--tls-ca", str(authority.ca)]
                node_options += ["--tls-name", "localhost"]
                with serve_node(tmp_path / "node", endpoint, node_secret, *node_options) as node:
                    ready = await node.ready()
                    assert ready["tls_server_name"] == "localhost"
                    for name, where in (("control", endpoint), ("node", ready["wire_endpoint"])):
                        before = await asyncio.to_thread(shown, where, admin_tls)
                        renewed = authority.issue(name).serial
                        assert renewed != before
                        await asyncio.to_thread(until, lambda: shown(where, admin_tls) == renewed)  # noqa: B023
                    # Channels that were open go on: this admin's, and the node's policy stream.
                    created = tenants_pb2.CreateTenantRequest(tenant_id="acme")
                    admin.call(admin.tenants.CreateTenant, created)
                    assert admin.exchange(auth_pb2.AUDIENCE_CONTROL).access_token
                    assert node.process.poll() is None
            served.process.terminate()
            status, printed = await asyncio.to_thread(served.end)
    assert status == 0
    assert '"TLS certificate"' in printed and "PRIVATE" not in printed


def test_a_control_plane_does_not_start_with_files_that_cannot_be_used(postgres: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    tls, other = authority.server(), authority.issue("other")
    options = ["--tls-cert", str(tls.certificate), "--tls-key", str(other.private_key)]
    with postgres.fresh_database(migrate) as database, serving(tmp_path / "control", *options, **urls(database)) as it:
        status, printed = it.end()
    assert status == 5
    assert "is not the one of the certificate" in printed and ssl.PEM_HEADER not in printed
