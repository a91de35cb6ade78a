"""A node's line to its control plane over TLS: another authority's control plane is reached once the node is told."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import grpc

from dataplane.control_client import ControlClient
from dataplane.registration import Registration
from saltern.auth.v1 import auth_pb2_grpc
from saltern.node.v1 import node_pb2_grpc
from saltern.rpc_tls import server_credentials
from saltern.tls import ClientTls
from saltern.tls_reload import ReloadingTls
from tests.clients.test_tls_files import Lines
from tests.dataplane.test_control_client import API_KEY, MIB, ScriptedControl, Sink
from tests.support.certificates import Authority


async def serve(control: ScriptedControl, authority: Authority, port: int) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    auth_pb2_grpc.add_AuthServiceServicer_to_server(control, server)
    node_pb2_grpc.add_NodeServiceServicer_to_server(control, server)
    credentials = server_credentials(ReloadingTls(authority.server(), Lines()))
    port = server.add_secure_port(f"127.0.0.1:{port}", credentials)
    await server.start()
    return server, port


async def test_a_node_takes_up_a_new_authority_without_a_restart(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old", "old"), Authority(tmp_path / "new", "new")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(old.ca.read_bytes())
    control = ScriptedControl()
    server, port = await serve(control, old, 0)
    registration = Registration("n", "127.0.0.1:1", "127.0.0.1:2", "", "host", MIB, tls_server_name="node.example")
    client = ControlClient(f"127.0.0.1:{port}", API_KEY, registration, Sink(), tls=ClientTls(trusted))
    try:
        async with asyncio.timeout(60), client:
            await client.join(10)
            assert control.registrations[0].endpoint.tls_server_name == "node.example"
            running = asyncio.create_task(client.run())
            try:
                await control.answers.get()
                await server.stop(None)
                server, _ = await serve(control, new, port)
                trusted.write_bytes(old.ca.read_bytes() + new.ca.read_bytes())
                await control.answers.get()
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running
    finally:
        await server.stop(None)
