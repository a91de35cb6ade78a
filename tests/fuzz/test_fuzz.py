"""A short fuzz of every RPC; ``make fuzz SECONDS=600`` is the long one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.fuzz.calls import NOBODY, Outcome
from tests.fuzz.checks import check_control
from tests.fuzz.control import ALL_ROLES, ControlFuzz
from tests.fuzz.node import TENANTS, fuzz_node
from tests.fuzz.oracle import faults_of_bytes, leaks
from tests.fuzz.services import Method, all_methods, cache_methods, control_methods
from tests.fuzz.values import Names, hostile_count, make_hostile, targets
from tests.fuzz.world import control_process, world_on
from tests.support.control import migrate
from tests.support.static_node import MIB, static_node

SEED = 4
#: On top of every method by every role, which comes first.
SECONDS = 8
#: Of services that others serve to us.
FOREIGN_SERVICES = {"saltern.kms.v2.KeyManagementService"}


def services(methods: list[Method]) -> set[str]:
    return {method.service for method in methods}


def served_by(endpoint: str, *metadata: tuple[str, str]) -> set[str]:
    with grpc.insecure_channel(endpoint) as channel:
        channel = grpc.intercept_channel(channel, _WithMetadata(metadata)) if metadata else channel
        return set(ProtoReflectionDescriptorDatabase(channel).get_services()) - {
            "grpc.reflection.v1alpha.ServerReflection"
        }


class _WithMetadata(grpc.StreamStreamClientInterceptor):
    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), requests)


@pytest.mark.timeout(180)
async def test_no_call_of_the_control_plane_brings_it_out_of_step(postgres: Any, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    with postgres.fresh_database(migrate) as urls, control_process(urls, tmp_path) as control:
        async with world_on(control) as world:
            outcome = await ControlFuzz(world, SEED).run(SECONDS)
            outcome.faults += await check_control(world, urls, outcome)
        assert not outcome.faults, "\n".join([f"seed {SEED}", *outcome.faults[:20]])
        require_reached(outcome, control_methods(), ALL_ROLES)
        assert served_by(control.endpoint) <= services(control_methods()), "a service that the fuzz does not know"
        # It is no fuzz where nothing is accepted.
        answered = {path.split("/")[1].rpartition(".")[2] for path, code in outcome.codes if code == "OK"}
        assert answered >= {"TenantService", "NamespaceService", "CredentialService", "UsageService", "AuthService"}


async def test_no_call_or_frame_brings_a_node_out_of_step() -> None:
    print(f"seed {SEED}")
    with static_node(TENANTS, dram_bytes=32 * MIB) as node:
        outcome, sessions = await fuzz_node(node, SEED, 3)
        assert not outcome.faults, "\n".join([f"seed {SEED}", *outcome.faults[:20]])
        require_reached(outcome, cache_methods(), ("writer", "reader", NOBODY))
        assert sessions > 10
        served = served_by(node.grpc_endpoint, ("authorization", f"Bearer {node.token('alpha', 'chat')}"))
        assert served <= services(cache_methods()), "a service that the fuzz does not know"


def require_reached(outcome: Outcome, methods: list[Method], roles: tuple[str, ...]) -> None:
    missed = [(method.path, role) for method in methods for role in roles if not outcome.reached[method.path, role]]
    assert not missed


def test_every_service_of_the_descriptors_is_fuzzed() -> None:
    assert (
        services(all_methods()) - FOREIGN_SERVICES
        == {
            service
            for service in services(control_methods()) | services(cache_methods())
            if service.startswith("saltern.")
        }
        - FOREIGN_SERVICES
    )


def hostile_requests() -> Iterator[Message]:
    names = Names(("alpha",), ("tenants/bravo",), ("key",))
    for method in all_methods():
        for target in targets(method.request):
            for value in range(hostile_count(target)):
                request = method.new_request()
                make_hostile(request, target, value, names, random.Random(0))
                yield request


def test_every_field_has_hostile_values_and_each_can_be_sent() -> None:
    sizes = [len(request.SerializeToString()) for request in hostile_requests()]
    fields = sum(1 for method in all_methods() for _ in targets(method.request))
    assert len(sizes) > 4 * fields
    assert max(sizes) < 1024 * 1024


def test_the_oracle_sees_insides_and_leaks() -> None:
    assert faults_of_bytes([b'File "/opt/x.py", line 3'])
    assert faults_of_bytes([b'duplicate key value violates unique constraint "tenants_pkey"'])
    assert not faults_of_bytes([b"tenants/acme does not exist", b"see proto/saltern"])
    assert leaks([b"... canary ..."], [b"canary"], b"")
    assert not leaks([b"canary-ns is not there"], [b"canary-ns"], b"tenants/b/namespaces/canary-ns")
