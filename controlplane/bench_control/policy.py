"""``python -m controlplane.bench_control.policy``: how long a change takes to be in force on every node."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final

import click
import grpc

from controlplane.bench_control.crowd import add_tenants, change_anything, nodes, snapshot_loads_ms
from controlplane.bench_control.measure import cpu_of
from controlplane.bench_control.stack import NAMESPACE, BenchStack, bench_stack, prepared_keys
from saltern.admin.v1 import (
    credentials_pb2,
    credentials_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    quotas_pb2,
    quotas_pb2_grpc,
    tenants_pb2,
    tokens_pb2,
    tokens_pb2_grpc,
)
from saltern.admin.v1.tenants_pb2_grpc import TenantServiceStub
from saltern.auth.v1 import auth_pb2, auth_pb2_grpc
from saltern.cache.v1 import cache_pb2, cache_pb2_grpc
from saltern.policy_version import read_policy_version

_TENANT: Final = "tenants/tenant-0"
_POLL_S: Final = 0.005
#: Single revocations that a tenant can have before they become one of all its tokens.
_REVOCATIONS_MAX: Final = 50
_WAIT_S: Final = 120
_PAGE_TENANTS: Final = 1_000
#: Between two looks at whether leases still move; a node reports every two seconds.
_REST_S: Final = 3.0


@click.command()
@click.option("--tenants", type=click.IntRange(1, 100_000), default=10_000, show_default=True)
@click.option("--nodes", "node_count", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option(
    "--rounds", type=click.IntRange(2, 10_000), default=100, show_default=True, help="Quota changes, at most."
)
@click.option("--seconds", type=click.FloatRange(1), default=120.0, show_default=True, help="For all, once nodes run.")
@click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def main(*, tenants: int, node_count: int, rounds: int, seconds: float, output: str) -> None:
    """Measure quota change to enforcement, revocation to refusal and a snapshot of every tenant, on real nodes."""
    with bench_stack() as stack, tempfile.TemporaryDirectory(prefix="saltern-bench-nodes-") as folder:
        measuring = measure(
            stack, Path(folder), tenants=tenants, node_count=node_count, rounds=rounds, duration_s=seconds
        )
        report = asyncio.run(measuring)
    click.echo(json.dumps(report, indent=2) if output == "json" else table(report))


async def measure(
    stack: BenchStack, folder: Path, *, tenants: int, node_count: int, rounds: int, duration_s: float
) -> dict[str, Any]:
    """Everything once, as often as fits into ``duration_s``; the node processes run meanwhile.

    Raises:
        TimeoutError: nodes do not come to rest with all tenants within ``duration_s``.
    """
    async with AsyncExitStack() as exits:
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(stack.control))
        (key,) = await exits.enter_async_context(prepared_keys(stack, channel, 1))
        cluster = Cluster(channel, await _bearer(channel, (stack.state_dir / "bench-admin-key").read_text()), key)
        node_keys = [await cluster.add_node_key(f"node-{number}") for number in range(node_count)]
        endpoints = exits.enter_context(nodes(stack, node_keys, folder))
        doors = [await exits.enter_async_context(grpc.aio.insecure_channel(endpoint)) for endpoint in endpoints]
        report: dict[str, Any] = {"cpus": os.cpu_count(), "tenants": tenants, "nodes": node_count}
        report["load_average_1_min_before"] = os.getloadavg()[0]
        async with asyncio.timeout(duration_s):
            await cluster.wait(0)
            began_s, cpu_s = perf_counter(), cpu_of(stack.control_pid)
            add_tenants(stack, tenants)
            await cluster.wait(0)
            await cluster.come_to_rest()
        report["all_tenants_s"] = perf_counter() - began_s
        left_s = duration_s - report["all_tenants_s"]
        report["list_page_ms"] = _spread(await _repeated(cluster.list_pages, 20, left_s * 0.1))
        cpu_s = cpu_of(stack.control_pid)
        report["quota_ms"] = _spread(await _repeated(cluster.quota_to_enforcement, rounds, left_s * 0.45))
        changes = report["quota_ms"]["rounds"]
        report["quota_control_cpu_ms"] = round(1000 * (cpu_of(stack.control_pid) - cpu_s) / changes, 1)
        report["revocation_ms"] = _spread(
            await _repeated(lambda: cluster.revocation_to_refusal(doors), min(rounds, _REVOCATIONS_MAX), left_s * 0.25)
        )
        everywhere = await _repeated(lambda: cluster.snapshot_everywhere(stack), 5, left_s * 0.2)
        report["snapshot_everywhere_ms"] = _spread(everywhere)
        report["snapshot_load_ms"] = _spread(snapshot_loads_ms(folder, tenants))
        report["load_average_1_min_after"] = os.getloadavg()[0]
        report["client_cpu_s"] = process_time()
        return report


async def _repeated(once: Callable[[], Awaitable[list[float]]], rounds: int, duration_s: float) -> list[float]:
    """What so many rounds took, or as many as begin within ``duration_s``; at least two."""
    taken: list[float] = []
    began_s = perf_counter()
    for number in range(rounds):
        if number >= 2 and perf_counter() - began_s > duration_s:
            break
        taken += await once()
    return taken


class Cluster:
    """The administrator's side, and one tenant's API key."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Any, api_key: str) -> None:
        self._metadata = metadata
        self._api_key = api_key
        self._changes = itertools.count()
        self._tenants: Any = TenantServiceStub(channel)
        self._auth: Any = auth_pb2_grpc.AuthServiceStub(channel)
        self._credentials: Any = credentials_pb2_grpc.CredentialServiceStub(channel)
        self._quotas: Any = quotas_pb2_grpc.QuotaServiceStub(channel)
        self._tokens: Any = tokens_pb2_grpc.TokenServiceStub(channel)
        self._policy: Any = policy_pb2_grpc.PolicyServiceStub(channel)

    async def add_node_key(self, node_id: str) -> str:
        """The secret of a key for one node."""
        request = credentials_pb2.CreateApiKeyRequest(
            api_key_id=node_id, api_key=credentials_pb2.ApiKey(role=credentials_pb2.ROLE_NODE, node_id=node_id)
        )
        secret: str = (await self._credentials.CreateApiKey(request, metadata=self._metadata)).secret
        return secret

    async def wait(self, version: int) -> int:
        """Until ``version`` is in force, and kept on disk, on every node; 0 for the newest. Returns which it was."""
        request = policy_pb2.WaitForPolicyRequest(version=version)
        request.timeout.FromSeconds(_WAIT_S)
        reached: int = (await self._policy.WaitForPolicy(request, metadata=self._metadata)).version
        return reached

    async def _changed(self, call: Callable[..., Any], request: Any) -> int:
        making = call(request, metadata=self._metadata)
        await making
        return read_policy_version(await making.trailing_metadata())

    async def come_to_rest(self) -> None:
        """Until leases have stopped to move: no version comes that nobody asked for."""
        newest = -1
        while newest != (newest := await self.wait(0)):  # noqa: ASYNC110 (that nothing comes makes no event)
            await asyncio.sleep(_REST_S)

    async def list_pages(self) -> list[float]:
        """Milliseconds of each page of the list of all tenants."""
        taken, token = [], ""
        while True:
            request = tenants_pb2.ListTenantsRequest(page_size=_PAGE_TENANTS, page_token=token)
            began_s = perf_counter()
            token = (await self._tenants.ListTenants(request, metadata=self._metadata)).next_page_token
            taken.append(1000 * (perf_counter() - began_s))
            if not token:
                return taken

    async def quota_to_enforcement(self) -> list[float]:
        """Milliseconds from sending a change of a quota until it is in force on every node."""
        limit_bytes = (1 + next(self._changes) % 2) << 24
        tier = quotas_pb2.TierQuota(tier=quotas_pb2.TIER_DRAM, limit_bytes=limit_bytes, weight=100)
        request = quotas_pb2.UpdateQuotaRequest(quota=quotas_pb2.Quota(name=f"{_TENANT}/quota", tiers=[tier]))
        began_s = perf_counter()
        await self.wait(await self._changed(self._quotas.UpdateQuota, request))
        return [1000 * (perf_counter() - began_s)]

    async def revocation_to_refusal(self, doors: list[grpc.aio.Channel]) -> list[float]:
        """Milliseconds from sending a revocation until every node has refused the token."""
        exchange = auth_pb2.ExchangeApiKeyRequest(
            api_key=self._api_key, audience=auth_pb2.AUDIENCE_NODE, namespace_id=NAMESPACE
        )
        token = (await self._auth.ExchangeApiKey(exchange)).access_token
        await asyncio.gather(*(_ask(door, token) for door in doors))
        request = tokens_pb2.RevokeTokenRequest(parent=_TENANT, token_id=_token_id(token))
        began_s = perf_counter()
        refusals = [asyncio.create_task(_refused(door, token)) for door in doors]
        await self._changed(self._tokens.RevokeToken, request)
        return [1000 * (max(await asyncio.gather(*refusals)) - began_s)]

    async def snapshot_everywhere(self, stack: BenchStack) -> list[float]:
        """Milliseconds for a change that may be of any tenant: every node gets all of its policy."""
        began_s = perf_counter()
        await self.wait(await asyncio.to_thread(change_anything, stack))
        return [1000 * (perf_counter() - began_s)]


async def _bearer(channel: grpc.aio.Channel, api_key: str) -> Any:
    auth: Any = auth_pb2_grpc.AuthServiceStub(channel)
    exchange = auth_pb2.ExchangeApiKeyRequest(api_key=api_key, audience=auth_pb2.AUDIENCE_CONTROL)
    return (("authorization", f"Bearer {(await auth.ExchangeApiKey(exchange)).access_token}"),)


def _ask(door: grpc.aio.Channel, token: str) -> Awaitable[Any]:
    stub: Any = cache_pb2_grpc.CacheServiceStub(door)
    request = cache_pb2.LookupBlocksRequest(namespace_id=NAMESPACE, epoch=1, keys=[bytes(32)])
    asking: Awaitable[Any] = stub.LookupBlocks(request, metadata=(("authorization", f"Bearer {token}"),))
    return asking


async def _refused(door: grpc.aio.Channel, token: str) -> float:
    """When a node has refused the token."""
    while True:
        try:
            await _ask(door, token)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                raise
            return perf_counter()
        await asyncio.sleep(_POLL_S)


def _token_id(token: str) -> str:
    payload = token.split(".")[1]
    token_id: str = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["jti"]
    return token_id


def _spread(taken_ms: list[float]) -> dict[str, float]:
    ordered = sorted(taken_ms)
    at = {"p50": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "max": len(ordered) - 1}
    return {name: round(ordered[index], 1) for name, index in at.items()} | {"rounds": len(ordered)}


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    what = {
        "quota_ms": "quota change, until in force and kept on every node",
        "revocation_ms": "revocation of a token, until every node has refused it",
        "snapshot_everywhere_ms": "change of any tenant: a snapshot to every node",
        "snapshot_load_ms": "of that, and of the first one: loading it, on a node",
        "list_page_ms": "list of all tenants, a page",
    }
    lines = [f"{report['tenants']} tenants, {report['nodes']} nodes{'':32} {'p50 ms':>9} {'p99 ms':>9} {'max ms':>9}"]
    for name, label in what.items():
        spread = report[name]
        lines.append(f"{label:56} {spread['p50']:9.1f} {spread['p99']:9.1f} {spread['max']:9.1f}")
    load = f"{report['load_average_1_min_before']:.1f} to {report['load_average_1_min_after']:.1f}"
    lines.append(
        f"all tenants made, leased and on every node within {report['all_tenants_s']:.1f} s;"
        f" {report['cpus']} CPUs, load {load}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
