"""The least that a gRPC service in Python can do: a unary call that answers what it was asked. Run as a process."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

METHOD = "/saltern.bench.Echo/Call"


async def _echo(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    return request


async def main() -> None:
    """Serve on a free port, which the one line of standard output names, until standard input ends."""
    server = grpc.aio.server()
    handler: Any = grpc.unary_unary_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("saltern.bench.Echo", {"Call": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
