"""Pages of the platform's administrators: tenants, nodes with their leases, policy versions."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from controlplane.console.calls import LIST_ITEMS_MAX
from controlplane.console.views.platform import newest_version, node_figures, node_rows, tenant_rows
from controlplane.console.visit import Visit, page
from saltern.admin.v1.tenants_pb2 import ListTenantsRequest
from saltern.admin.v1.usage_pb2 import ListNodesRequest, ListUsagesRequest, Node


@page
async def tenants(visit: Visit) -> Response:
    found, usages = await asyncio.gather(
        visit.calls.list(visit.services.tenants.ListTenants, ListTenantsRequest(), "tenants"),
        visit.calls.list(visit.services.usage.ListUsages, ListUsagesRequest(), "usages"),
    )
    rows = tenant_rows(found, {usage.tenant: usage for usage in usages})
    return visit.render("tenants.html", "Tenants", tenants=rows, is_cut=len(found) >= LIST_ITEMS_MAX)


@page
async def nodes(visit: Visit) -> Response:
    found = await _nodes(visit)
    return visit.render(
        "nodes.html", "Nodes and leases", nodes=node_rows(found, visit.now), figures=node_figures(found)
    )


@page
async def policy(visit: Visit) -> Response:
    found = await _nodes(visit)
    return visit.render("policy.html", "Policy", nodes=node_rows(found, visit.now), newest=newest_version(found))


async def _nodes(visit: Visit) -> list[Node]:
    return await visit.calls.list(visit.services.usage.ListNodes, ListNodesRequest(), "nodes")
