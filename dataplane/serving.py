"""A node's life: it opens its doors, joins its control plane, serves, and leaves in order."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import structlog

from dataplane.control_client import ControlClient
from dataplane.io import garbage
from dataplane.node import Node, NodeEndpoints
from dataplane.policy_file import PolicyFile
from dataplane.registration import Registration
from dataplane.settings import NodeSettings
from saltern.admin_client import ApiKey
from saltern.errors import DeadlineExceededError, UnavailableError
from saltern.tls import ClientTls

_log = structlog.get_logger(__name__)
#: How long a registered node waits for its first policy.
FIRST_POLICY_S: Final = 15.0


async def serve(
    settings: NodeSettings,
    control: str,
    api_key: ApiKey,
    *,
    kept: PolicyFile,
    state_id: str,
    control_tls: ClientTls | None,
    control_wait_s: float,
    ready_file: Path | None,
) -> None:
    """Serve one node until SIGTERM or SIGINT.

    Args:
        control: ``host:port`` of the control plane.
        kept: where the last policy is kept for a restart (I9).
        state_id: of the state folder.
        control_tls: whom to trust at the control plane; None for plain text.
        control_wait_s: how long to wait for a control plane that is starting as well; and for the first policy, if that
            is longer than ``FIRST_POLICY_S``.
        ready_file: written when the node serves, removed at the end.

    Raises:
        SalternError: the node cannot start, is refused, or may serve its policy no longer.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    node = Node(settings)
    async with AsyncExitStack() as outer, AsyncExitStack() as stack:
        endpoints = await stack.enter_async_context(node.serving())
        passes = garbage.IdlePasses(lambda: node.turns)
        passes.start()
        stack.callback(passes.close)
        registration = Registration(
            node_id=settings.node_id,
            wire_endpoint=endpoints.wire_endpoint,
            grpc_endpoint=endpoints.grpc_endpoint,
            shm_path=endpoints.shm_path,
            host_id=endpoints.host_id,
            dram_capacity_bytes=settings.dram_bytes,
            ssd_capacity_bytes=settings.ssd.capacity_bytes if settings.ssd else 0,
            tls_server_name=endpoints.tls_server_name,
            state_id=state_id,
        )
        client = await outer.enter_async_context(
            ControlClient(control, api_key, registration, node, kept, tls=control_tls)
        )
        outer.push_async_callback(client.report_last)  # when the doors are closed and every request has ended
        if not await _until(stop, _join(client, control_wait_s)):
            return
        node.control = client.link
        # Stopped first of all on the way out: a leaving node must not register again over its successor.
        following = asyncio.create_task(client.run(), name="control client")
        stack.push_async_callback(_cancel, following)
        if not await _until(stop, _first_policy(client, control, max(FIRST_POLICY_S, control_wait_s))):
            return
        garbage.settle()  # once more: DRAM that was adopted with the first policy may be a million new objects
        if ready_file is not None:
            write_ready_file(ready_file, endpoints)
            stack.callback(ready_file.unlink, missing_ok=True)
        for endpoint in settings.listening_in_plain_text.values():
            if not endpoint.is_loopback:
                _log.warning("listening in plain text beyond this host", endpoint=str(endpoint))
        _log.info(
            "serving",
            wire=endpoints.wire_endpoint,
            grpc=endpoints.grpc_endpoint,
            metrics=endpoints.metrics_endpoint,
            dram=str(node.dram_start),
        )
        stopping = asyncio.create_task(stop.wait())
        outlasting = asyncio.create_task(client.outlast(), name="policy age")
        ended, _ = await asyncio.wait({stopping, following, outlasting}, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(stopping)
        await _cancel(outlasting)
        _log.info("draining", sessions=node.session_count)
        for task in ended - {stopping}:
            task.result()  # raises: following ends by a fault of ours alone, outlasting when the policy is too old


async def _join(client: ControlClient, patience_s: float) -> None:
    """Register; where the control plane does not answer in time, serve the policy of before the restart (I9)."""
    try:
        await client.join(patience_s)
    except (UnavailableError, DeadlineExceededError) as error:
        client.resume(error)


async def _first_policy(client: ControlClient, control: str, patience_s: float) -> None:
    try:
        await asyncio.wait_for(client.has_policy.wait(), patience_s)
    except TimeoutError:
        raise UnavailableError(
            f"registered at {control}, but no policy that this node can serve came within {patience_s:.0f} s",
            reason="NO_POLICY",
            hint="see the node's log for the reason a policy was refused, and the control plane's log",
        ) from None


async def _until(stop: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Await ``work``; False if ``stop`` was set first. Raises what ``work`` raises."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        await _cancel(working)
        await _cancel(stopping)


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})


def write_ready_file(path: Path, endpoints: NodeEndpoints) -> None:
    """Write where the node serves, whole or not at all: whoever waits for the file can read it at once."""
    content = {
        "node_id": endpoints.node_id,
        "wire_endpoint": endpoints.wire_endpoint,
        "grpc_endpoint": endpoints.grpc_endpoint,
        "shm_path": endpoints.shm_path,
        "metrics_endpoint": endpoints.metrics_endpoint,
        "tls_server_name": endpoints.tls_server_name,
        "pid": os.getpid(),
    }
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # whatever the umask says
    with os.fdopen(descriptor, "w") as file:
        file.write(json.dumps(content) + "\n")
    partial.replace(path)
