"""``saltern doctor``: looks at everything between this shell and the cache, and says how to mend what is wrong."""

from __future__ import annotations

import base64
import binascii
import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from saltern.cli.finding import Finding, State, failed, ok, warn
from saltern.cli.parameters import NAMESPACE
from saltern.cli.render import Table, print_json
from saltern.cli.settings import Command, Settings, settings_of
from saltern.cli.stack import Target, find_target, read_run_file
from saltern.endpoints import parse_endpoint
from saltern.errors import SalternError
from saltern.names import NamespaceId

if TYPE_CHECKING:
    from saltern.admin_client import AdminClient
    from saltern.auth.v1.auth_pb2 import ExchangeApiKeyResponse
    from saltern.tls import ClientTls

#: A verifier accepts a token from at most 5 s in its future; warn well before that.
_SKEW_WARN_S: Final = 2.0
#: Nodes report every two seconds.
_REPORT_S: Final = 2.5
_READERS_OF_KEYS: Final = frozenset({"platform-admin", "tenant-admin", "tenant-auditor"})
_STYLES: Final = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red"}


@click.command("doctor", cls=Command)
@click.option("--namespace", "namespace_id", type=NAMESPACE, help="Also open this namespace of the key's tenant.")
@click.option(
    "--console",
    "console_url",
    metavar="URL",
    envvar="SALTERN_CONSOLE_URL",
    help="Also look at the console there, as browsers reach it. [a local stack's own]",
)
@click.pass_context
def doctor(ctx: click.Context, namespace_id: NamespaceId | None, console_url: str | None) -> int:
    """Check packages, machine, control plane, API key, clock, console and every node; say how to mend what is wrong.

    With --namespace and a tenant's API key the check goes all the way: it opens sessions on each node as that tenant.
    Exits with 0 unless a check fails; warnings do not count.
    """
    settings = settings_of(ctx)
    findings = list(_examine(settings, namespace_id, console_url))
    if settings.json:
        print_json(
            {
                "checks": [
                    {"check": item.check, "state": item.state.value, "detail": item.detail, "hint": item.hint}
                    for item in findings
                ]
            }
        )
    else:
        _print_table(settings, findings)
    return next((item.exit_code for item in findings if item.state is State.FAIL), 0)


def _print_table(settings: Settings, findings: list[Finding]) -> None:
    from rich.text import Text

    table = Table()
    for item in findings:
        table.add(Text(item.state.value, style=_STYLES[item.state]), item.check, item.detail)
        if item.hint:
            table.add(" ", " ", f"-> {item.hint}")
    table.print(settings)


def _examine(settings: Settings, namespace_id: NamespaceId | None, console_url: str | None) -> Iterator[Finding]:
    from saltern.admin_client import AdminClient
    from saltern.cli import host_facts, rdma_facts

    yield from host_facts.packages()
    yield from host_facts.integrations()
    yield from host_facts.host()
    yield from rdma_facts.examine()
    try:
        target = find_target(settings)
        client = AdminClient(target.control, target.api_key, deadline_ms=settings.deadline_ms, tls=target.tls)
    except SalternError as error:
        yield failed("configuration", error)
        return
    with client as admin:
        yield from _configuration(settings, target)
        yield from _console(settings, target, console_url)
        claims: dict[str, Any] = {}
        yield from _control_plane(admin, settings, claims)
        if not claims:
            return  # without a token there is nothing more to ask
        yield from _books(admin, str(claims.get("role", "")), namespace_id)
        yield from _nodes(admin, settings, target.tls, namespace_id)


def _configuration(settings: Settings, target: Target) -> Iterator[Finding]:
    from saltern.cli.probes import Door, check_certificate

    yield ok("configuration", f"control plane {target.control} ({target.source})")
    endpoint = parse_endpoint(target.control, port_min=1)
    if target.tls is not None:
        door = Door(target.control, settings.deadline_ms, target.tls, target.tls.server_name or endpoint.host)
        yield check_certificate("certificate", door)
    elif not endpoint.is_loopback:
        yield warn(
            "transport",
            f"the API key goes to {endpoint.host} in plain text",
            "use TLS (--tls-ca), or stay inside a network that you trust",
        )
    path = settings.api_key_file
    if path is not None and path.stat().st_mode & 0o077:
        yield warn("API key file", f"{path} can be read by others", f"chmod 600 {path}")
    if path is not None and os.environ.get("SALTERN_API_KEY"):
        yield warn(
            "API key file",
            f"SALTERN_API_KEY is set too, and not used: {path} comes first",
            "unset one of them, so that it is clear whose key is used",
        )


def _console(settings: Settings, target: Target, url: str | None) -> Iterator[Finding]:
    """The console at ``url``, or that of the local stack which was found; nothing where neither is known."""
    from saltern.cli import console_facts
    from saltern.cli.settings import default_data_dir

    if url is None and settings.control is None:
        url = str(read_run_file(settings.data_dir or default_data_dir()).get("console_url") or "")
        if not url:
            yield ok("console", "this stack serves none: pip install 'saltern-server[console]' for one")
    if url:
        yield from console_facts.examine(url, settings.deadline_ms, target.tls)


def _control_plane(admin: AdminClient, settings: Settings, claims: dict[str, Any]) -> Iterator[Finding]:
    """``claims`` is filled with what the token says, if there is one."""
    from saltern.auth.v1.auth_pb2 import AUDIENCE_CONTROL
    from saltern.cli.probes import check_health

    yield check_health("control plane", admin.channel, admin.endpoint, settings.deadline_ms)
    started_s = time.time()
    try:
        session = admin.exchange(AUDIENCE_CONTROL)
    except SalternError as error:
        yield failed("API key", error)
        return
    middle_s = (started_s + time.time()) / 2
    claims |= _claims(session)
    owner = f"of tenant {session.tenant_id}" if session.tenant_id else "of the platform"
    yield ok("API key", f"accepted; {claims.get('role', 'unknown role')} {owner}")
    issued_at_s = claims.get("iat")
    if isinstance(issued_at_s, int):
        # iat is in whole seconds: half a second is the best estimate of what was cut off.
        skew_s = issued_at_s + 0.5 - middle_s
        text = f"{abs(skew_s):.1f} s {'ahead' if skew_s > 0 else 'behind'} at the control plane"
        yield (
            ok("clock", f"within {_SKEW_WARN_S:g} s of the control plane")
            if abs(skew_s) <= _SKEW_WARN_S
            else warn("clock", text, "let both machines follow NTP: nodes refuse tokens from more than 5 s ahead")
        )


def _claims(session: ExchangeApiKeyResponse) -> dict[str, Any]:
    """What the token says, unverified: good enough to describe it to its owner, for nothing else."""
    try:
        payload = session.access_token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError, binascii.Error):
        return {}
    return claims if isinstance(claims, dict) else {}


def _books(admin: AdminClient, role: str, namespace_id: NamespaceId | None) -> Iterator[Finding]:
    """Quotas, limits and keys; asks only for what ``role`` may read, since denials are audited."""
    from saltern.admin.v1.credentials_pb2 import ListApiKeysRequest
    from saltern.admin.v1.namespaces_pb2 import GetNamespaceRequest
    from saltern.admin.v1.quotas_pb2 import GetQuotaRequest
    from saltern.admin.v1.tenants_pb2 import ListTenantsRequest
    from saltern.admin.v1.usage_pb2 import ListNodesRequest, ListUsagesRequest
    from saltern.cli import deployment_facts

    tenant = f"tenants/{admin.tenant_id}" if admin.tenant_id else ""
    try:
        if role in _READERS_OF_KEYS:
            keys = admin.iterate(admin.credentials.ListApiKeys, ListApiKeysRequest(parent=tenant), "api_keys")
            yield from deployment_facts.of_keys(keys, datetime.now(UTC))
        if tenant:
            quota = admin.call(admin.quotas.GetQuota, GetQuotaRequest(name=f"{tenant}/quota"))
            yield deployment_facts.of_quota(quota)
            if namespace_id is not None:
                request = GetNamespaceRequest(name=f"{tenant}/namespaces/{namespace_id}")
                yield deployment_facts.of_namespace(admin.call(admin.namespaces.GetNamespace, request), quota)
        elif role == "platform-admin":
            nodes = list(admin.iterate(admin.usage.ListNodes, ListNodesRequest(), "nodes"))
            if any(node.policy_lag for node in nodes):  # as after every change: whoever still lags then is told
                time.sleep(_REPORT_S)
                nodes = list(admin.iterate(admin.usage.ListNodes, ListNodesRequest(), "nodes"))
            usages = list(admin.iterate(admin.usage.ListUsages, ListUsagesRequest(), "usages"))
            tenants = admin.iterate(admin.tenants.ListTenants, ListTenantsRequest(), "tenants")
            is_local = parse_endpoint(admin.endpoint).is_loopback
            yield from deployment_facts.of_nodes(nodes, is_control_local=is_local)
            yield deployment_facts.of_memory(nodes, usages)
            yield from deployment_facts.of_tenants(tenants, usages)
    except SalternError as error:
        yield failed("books", error)


def _nodes(
    admin: AdminClient, settings: Settings, tls: ClientTls | None, namespace_id: NamespaceId | None
) -> Iterator[Finding]:
    from saltern.admin.v1.usage_pb2 import ListNodesRequest, Node
    from saltern.auth.v1.auth_pb2 import AUDIENCE_NODE
    from saltern.cli.probes import Door, check_certificate, check_door, check_grpc, check_session
    from saltern.wire import Hello

    deadline_ms = settings.deadline_ms
    if namespace_id is not None:
        try:
            grant = admin.exchange(AUDIENCE_NODE, namespace_id=namespace_id)
        except SalternError as error:
            yield failed(f"namespace {namespace_id}", error)
            return
        epoch = grant.salt_keys[-1].epoch if grant.salt_keys else 1
        hello = Hello(token=grant.access_token, namespace=namespace_id, epoch=epoch, client="saltern doctor")
        yield ok(f"namespace {namespace_id}", f"served by {len(grant.nodes)} live node{'s' * (len(grant.nodes) != 1)}")
        for endpoint in grant.nodes:
            name = endpoint.tls_server_name
            wire = Door(endpoint.wire_endpoint, deadline_ms, tls, name)
            if tls is not None and name:
                yield check_certificate(f"{endpoint.node_id} certificate", wire)
            yield check_session(f"{endpoint.node_id} wire", wire, hello)
            if endpoint.shm_path:
                yield check_session(f"{endpoint.node_id} shm", Door(endpoint.shm_path, deadline_ms), hello)
            if endpoint.grpc_endpoint:
                yield check_grpc(
                    f"{endpoint.node_id} gRPC", Door(endpoint.grpc_endpoint, deadline_ms, tls, name), hello
                )
        return
    try:
        if admin.tenant_id:
            yield ok("nodes", "not looked at: pass --namespace to open one as this tenant")
            return
        nodes: list[Node] = list(admin.iterate(admin.usage.ListNodes, ListNodesRequest(), "nodes"))
    except SalternError as error:
        yield failed("nodes", error)
        return
    if not nodes:
        yield warn("nodes", "none has registered", "start one: `saltern serve node`")
    shm_paths = _local_shm_paths(settings)
    for node in nodes:
        node_id = node.name.removeprefix("nodes/")
        if node.state != Node.STATE_LIVE:
            yield warn(f"node {node_id}", "lost: it does not report", f"look at its log, or start {node_id} again")
            continue
        wire = Door(node.wire_endpoint, deadline_ms, tls, node.tls_server_name)
        if tls is not None and node.tls_server_name:
            yield check_certificate(f"node {node_id} certificate", wire)
        yield check_door(f"node {node_id} wire", wire)
        yield check_grpc(f"node {node_id} gRPC", Door(node.grpc_endpoint, deadline_ms, tls, node.tls_server_name))
        if node_id in shm_paths:
            yield check_door(f"node {node_id} shm", Door(shm_paths[node_id], deadline_ms))


def _local_shm_paths(settings: Settings) -> dict[str, str]:
    """Sockets of the shared-memory transport, which only a stack on this machine tells."""
    from saltern.cli.settings import default_data_dir

    try:
        run = read_run_file(settings.data_dir or default_data_dir())
        return {str(node["node_id"]): str(node["shm_path"]) for node in run["nodes"] if node.get("shm_path")}
    except (SalternError, KeyError, TypeError, AttributeError):
        return {}
