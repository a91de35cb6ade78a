"""Connections that call nothing: bounded, and closed after a while, whatever HTTP/2 they speak meanwhile."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import pytest

from controlplane import server as control_server
from dataplane.io import grpc_door
from saltern.rpc_connections import CONNECTIONS_MAX, connection_limits
from tests.support.control import control_plane, migrate
from tests.support.static_node import MIB, static_node, tenant_policy
from tests.support.waiting import wait_until

#: RFC 9113, section 3.4: the preface, and SETTINGS without any.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_PLACES = 6


def limited(idle_ms: int) -> Callable[[], Any]:
    return lambda: connection_limits(connections_max=_PLACES, idle_ms=idle_ms)


def idle_connections(stack: ExitStack, endpoint: str, count: int) -> list[socket.socket]:
    """Connections that say that they speak HTTP/2, and no more."""
    host, _, port = endpoint.rpartition(":")
    found = []
    for _ in range(count):
        found.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=30)))
        found[-1].sendall(_PREFACE)
        with suppress(ConnectionError):
            found[-1].recv(256)  # the other side's SETTINGS, or its end
    return found


def is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        while data := sock.recv(4096):
            assert data
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def is_served(endpoint: str) -> bool:
    """Whether somebody who calls something gets an answer of the service."""
    with grpc.insecure_channel(endpoint) as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check", request_serializer=bytes)
        try:
            call(b"", timeout=30)
        except grpc.RpcError as error:
            return bool(error.code() is not grpc.StatusCode.UNAVAILABLE)  # type: ignore[attr-defined]
    return True


def flood(endpoint: str) -> None:
    with ExitStack() as stack:
        idle = idle_connections(stack, endpoint, 2 * _PLACES)
        assert sum(map(is_closed, idle)) >= _PLACES, "no more are taken than there are places"
        wait_until(lambda: all(map(is_closed, idle)))
        assert is_served(endpoint)


async def test_i10_connections_without_a_call_take_no_place_of_the_control_plane_for_long(
    postgres: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "connection_limits", limited(1000))
    with postgres.fresh_database(migrate) as urls:
        async with control_plane(urls, tmp_path) as control:
            await control.channel.close()
            await asyncio.to_thread(flood, str(control.plane.endpoint))


def test_i10_connections_without_a_call_take_no_place_of_a_node_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_door, "connection_limits", limited(1000))
    with static_node({"acme": tenant_policy(limit_bytes=MIB)}) as node:
        flood(node.grpc_endpoint)


def test_there_are_always_more_descriptors_than_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for descriptors, expected in ((1024, 512), (64, 32), (1 << 20, CONNECTIONS_MAX)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, found=descriptors: (found, found))
        assert dict(connection_limits())["grpc.max_allowed_incoming_connections"] == expected
