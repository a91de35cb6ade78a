"""The node's gRPC health service: the truth of /readyz, for callers without a token, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dataplane.io.grpc_door import TENANT_CALLS_MAX
from dataplane.io.health import CACHE_SERVICE
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy

NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING
TENANTS = {"acme": tenant_policy(limit_bytes=MIB)}
DEADLINE_S = 20


@pytest.fixture
def node() -> Iterator[StaticNode]:
    with static_node(TENANTS) as running:
        yield running


@pytest.mark.parametrize("service", ["", CACHE_SERVICE])
def test_a_watch_follows_the_node_from_its_first_policy_to_its_end(service: str) -> None:
    with static_node(apply_policy=False) as node, grpc.insecure_channel(node.grpc_endpoint) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        told = health.Watch(request, timeout=DEADLINE_S)
        assert next(told).status == NOT_SERVING
        node.apply(TENANTS)
        assert next(told).status == SERVING
        assert health.Check(request, timeout=DEADLINE_S).status == SERVING
        node.stop()
        # It ends with the node's last word, and before the time that draining may take: nobody waits for watchers.
        assert [response.status for response in told] == [NOT_SERVING]


def test_a_service_that_is_not_here_is_not_known(node: StaticNode) -> None:
    with grpc.insecure_channel(node.grpc_endpoint) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="saltern.admin.v1.TenantService")
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(request, timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert [response.status for response in health.Watch(request, timeout=DEADLINE_S)] == [unknown]


def test_watchers_hold_up_no_check_and_no_tenant(node: StaticNode) -> None:
    with grpc.insecure_channel(node.grpc_endpoint) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        watches = [health.Watch(request, timeout=DEADLINE_S) for _ in range(TENANT_CALLS_MAX)]
        assert all(next(watch).status == SERVING for watch in watches)
        with pytest.raises(grpc.RpcError) as caught:
            next(health.Watch(request, timeout=DEADLINE_S))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        assert health.Check(request, timeout=DEADLINE_S).status == SERVING
        for watch in watches:
            watch.cancel()


def test_reflection_tells_the_services_to_whoever_has_a_token(node: StaticNode) -> None:
    with grpc.insecure_channel(node.grpc_endpoint) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.ServerReflectionInfo(iter(requests), timeout=DEADLINE_S))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
        metadata = (("authorization", f"Bearer {node.token('acme', 'chat')}"),)
        (response,) = stub.ServerReflectionInfo(iter(requests), metadata=metadata, timeout=DEADLINE_S)
        names = {service.name for service in response.list_services_response.service}
        assert {CACHE_SERVICE, "grpc.health.v1.Health"} <= names
