"""gRPC over TLS against the gRPC door of a real node."""

from __future__ import annotations

import ssl
import threading
import time
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from saltern.errors import SalternError, UnavailableError
from saltern.rpc_errors import error_from_rpc
from saltern.rpc_tls import open_channel
from saltern.tls import ClientTls
from tests.support.certificates import Authority
from tests.support.static_node import StaticNode, static_node


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def check(node: StaticNode, tls: ClientTls | None) -> int | SalternError:
    # A pool of its own, or gRPC would go on with a connection that another channel has opened.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    with open_channel(node.grpc_endpoint, tls, options) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        except grpc.RpcError as error:
            return error_from_rpc(error, endpoint=node.grpc_endpoint)
    return answer.status


def test_a_trusting_client_is_served_and_a_stranger_s_certificate_refused(authority: Authority, tmp_path: Path) -> None:
    with static_node(tls=authority.server()) as node:
        assert check(node, authority.client()) == health_pb2.HealthCheckResponse.SERVING
        error = check(node, Authority(tmp_path / "other").client())
        assert isinstance(error, UnavailableError) and error.reason == "TLS_CERTIFICATE_REFUSED", error
        error = check(node, replace(authority.client(), server_name="elsewhere.example"))
        assert isinstance(error, UnavailableError) and error.reason == "TLS_CERTIFICATE_REFUSED", error


def test_neither_side_falls_back_to_plain_text(authority: Authority) -> None:
    with static_node(tls=authority.server()) as node:
        assert isinstance(check(node, None), UnavailableError)
    with static_node() as node:
        error = check(node, authority.client())
        assert isinstance(error, UnavailableError) and error.reason == "TLS_FAILED", error


def test_with_a_client_ca_nobody_gets_in_without_a_certificate_of_it(authority: Authority, tmp_path: Path) -> None:
    stranger = replace(Authority(tmp_path / "other").client("mallory"), ca=authority.ca)
    with static_node(tls=authority.server(client_ca=authority.ca)) as node:
        assert isinstance(check(node, authority.client()), UnavailableError)
        assert isinstance(check(node, stranger), UnavailableError)
        assert check(node, authority.client("engine")) == health_pb2.HealthCheckResponse.SERVING


def test_a_replaced_certificate_is_shown_to_the_next_client_and_channels_go_on(authority: Authority) -> None:
    tls = authority.server()
    with (
        static_node(tls=tls) as node,
        open_channel(node.grpc_endpoint, authority.client(), [("grpc.use_local_subchannel_pool", 1)]) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        health.Check(health_pb2.HealthCheckRequest(), timeout=20)
        first = shown(node)
        second = authority.issue("server").serial
        deadline_s = time.monotonic() + 20
        while shown(node) != second:
            assert time.monotonic() < deadline_s
            threading.Event().wait(0.1)
        assert first != second
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=20).status == 1
        tls.private_key.unlink()
        threading.Event().wait(1.2)  # longer than the node leaves its files alone
        assert shown(node) == second
        assert check(node, authority.client()) == 1


def shown(node: StaticNode) -> int:
    host, port = node.grpc_endpoint.rsplit(":", 1)
    return x509.load_pem_x509_certificate(ssl.get_server_certificate((host, int(port))).encode()).serial_number
