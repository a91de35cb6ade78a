"""Misconfigurations, planted one by one: ``saltern doctor`` names each and says how to mend it.

Those of RDMA are in ``tests/clients/rdma/test_doctor.py`` and ``tests/rdma``, certificates that end in
``tests/controlplane/test_up_tls.py``.
"""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from saltern.admin.v1.credentials_pb2 import ApiKey
from saltern.admin.v1.quotas_pb2 import TIER_DRAM
from saltern.admin.v1.usage_pb2 import Node, TierUsage, Usage
from saltern.cli import deployment_facts, host_facts
from saltern.cli.finding import Finding, State
from saltern.cli.probes import Door, check_door
from saltern.demo.stack import Stack
from tests.clients.cli.conftest import Outcome, Saltern

GIB = 1 << 30
SOON = 7  # days


def finding(shown: Outcome, check: str) -> tuple[str, str, str]:
    """State, detail and hint of one check of a report; the check must be there once."""
    (found,) = [one for one in json.loads(shown.out)["checks"] if one["check"] == check]
    assert found["state"] == "OK" or found["hint"], "what is wrong comes with what to do"
    return found["state"], found["detail"], found["hint"]


@pytest.fixture
def doctor(saltern: Saltern) -> Callable[..., Outcome]:
    return lambda *arguments: saltern("doctor", "-o", "json", *arguments)


@pytest.fixture
def writer(saltern: Saltern, tenant: str, tmp_path: Path) -> str:
    """The file of a writer's key of ``tenant``."""
    file = tmp_path / "writer.key"
    saltern("key", "create", "writer", "--tenant", tenant, "--role", "writer", "--save", str(file))
    return str(file)


@contextmanager
def a_stranger() -> Iterator[str]:
    """A port where something listens that is not Saltern: it greets, and ends the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_1_nothing_listens_at_the_control_planes_address(doctor: Callable[..., Outcome]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    shown = doctor("--control", f"127.0.0.1:{port}", "--deadline-ms", "2000")
    assert finding(shown, "control plane")[0] == "FAIL"
    assert shown.code == 7


def test_2_an_address_that_is_a_url(doctor: Callable[..., Outcome]) -> None:
    shown = doctor("--control", "http://127.0.0.1:7700")
    assert finding(shown, "configuration")[0] == "FAIL"
    assert "HOST:PORT" in shown.out


def test_3_no_file_with_an_api_key(doctor: Callable[..., Outcome], tmp_path: Path) -> None:
    state, detail, hint = finding(doctor("--api-key-file", str(tmp_path / "gone.key")), "configuration")
    assert (state, "gone.key" in detail, "saltern key create" in hint) == ("FAIL", True, True)


def test_4_a_key_that_others_can_read(doctor: Callable[..., Outcome], writer: str) -> None:
    Path(writer).chmod(0o644)
    state, _, hint = finding(doctor("--api-key-file", writer), "API key file")
    assert (state, hint) == ("WARN", f"chmod 600 {writer}")


def test_5_two_credentials_at_once(
    doctor: Callable[..., Outcome], writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALTERN_API_KEY", "sk-saltern-0123456789abcdef-" + "A" * 43)
    state, detail, _ = finding(doctor("--api-key-file", writer), "API key file")
    assert (state, "comes first" in detail, "AAAA" in detail) == ("WARN", True, False)


def test_6_a_key_that_was_deleted(doctor: Callable[..., Outcome], saltern: Saltern, tenant: str, writer: str) -> None:
    saltern("key", "delete", "writer", "--tenant", tenant, "--yes")
    shown = doctor("--api-key-file", writer)
    assert finding(shown, "API key")[0] == "FAIL"
    assert shown.code == 4


def test_7_a_key_that_ends_soon(doctor: Callable[..., Outcome], saltern: Saltern, tenant: str, tmp_path: Path) -> None:
    file = tmp_path / "admin.key"
    options = ("--tenant", tenant, "--role", "tenant-admin", "--expires-in", f"{SOON}d", "--save", str(file))
    saltern("key", "create", "short", *options)
    state, detail, hint = finding(doctor("--api-key-file", str(file)), "API keys")
    assert (state, "short" in detail, "saltern key rotate short" in hint) == ("WARN", True, True)


def test_8_tls_asked_of_a_control_plane_without(doctor: Callable[..., Outcome]) -> None:
    assert finding(doctor("--tls-ca", "system", "--deadline-ms", "3000"), "certificate")[0] == "FAIL"


def test_9_an_authority_that_is_no_certificate(doctor: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("not PEM")
    shown = doctor("--tls-ca", str(tmp_path / "ca.pem"), "--deadline-ms", "3000")
    assert "ca.pem" in shown.out + shown.err
    assert shown.code != 0


def test_10_a_tenant_without_a_quota(doctor: Callable[..., Outcome], saltern: Saltern, tmp_path: Path) -> None:
    saltern("tenant", "create", "without-quota")
    file = tmp_path / "w.key"
    saltern("key", "create", "w", "--tenant", "without-quota", "--role", "writer", "--save", str(file))
    try:
        state, detail, hint = finding(doctor(), "quotas")
        assert (state, "without-quota" in detail, "saltern quota set" in hint) == ("WARN", True, True)
        state, detail, _ = finding(doctor("--api-key-file", str(file)), "quota")
        assert (state, "nothing is ever stored" in detail) == ("WARN", True)
    finally:
        saltern("tenant", "delete", "without-quota", "--yes")


def test_11_a_suspended_tenant(doctor: Callable[..., Outcome], saltern: Saltern, tenant: str, writer: str) -> None:
    saltern("tenant", "suspend", tenant, "--yes")
    try:
        state, detail, hint = finding(doctor(), "tenants")
        assert (state, tenant in detail, "saltern tenant resume" in hint) == ("WARN", True, True)
        assert finding(doctor("--api-key-file", writer), "API key")[0] == "FAIL"
    finally:
        saltern("tenant", "resume", tenant)


def test_12_a_namespace_that_is_not_there(doctor: Callable[..., Outcome], writer: str) -> None:
    shown = doctor("--api-key-file", writer, "--namespace", "chatt")
    assert finding(shown, "namespace chatt")[0] == "FAIL"
    assert shown.code == 3


def test_13_a_namespace_that_may_hold_nothing(
    doctor: Callable[..., Outcome], saltern: Saltern, tenant: str, writer: str
) -> None:
    saltern("namespace", "update", tenant, "chat", "--dram-limit", "0")
    try:
        state, detail, hint = finding(doctor("--api-key-file", writer, "--namespace", "chat"), "namespace chat limits")
        assert (state, "nothing in DRAM" in detail, "--dram-limit" in hint) == ("WARN", True, True)
    finally:
        saltern("namespace", "update", tenant, "chat", "--dram-limit", "none")


def test_14_a_block_that_does_not_fit_its_limit(
    doctor: Callable[..., Outcome], saltern: Saltern, tenant: str, writer: str
) -> None:
    shape = ("--model-fingerprint", "m", "--block-tokens", "16", "--block-bytes", "4MiB", "--dram-limit", "1MiB")
    saltern("namespace", "create", tenant, "wide", *shape)
    shown = doctor("--api-key-file", writer, "--namespace", "wide")
    state, detail, _ = finding(shown, "namespace wide limits")
    assert (state, "does not fit" in detail) == ("WARN", True)


def test_15_a_node_that_was_left_cordoned(doctor: Callable[..., Outcome], saltern: Saltern) -> None:
    saltern("node", "cordon", "node-1")
    try:
        state, detail, hint = finding(doctor(), "node node-1")
        assert (state, "cordoned" in detail, "uncordon" in hint) == ("WARN", True, True)
    finally:
        saltern("node", "uncordon", "node-1")


def test_16_a_clock_that_is_wrong(doctor: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time=lambda: time.time() - 60, sleep=time.sleep)
    monkeypatch.setattr("saltern.cli.doctor.time", clock)
    state, detail, hint = finding(doctor(), "clock")
    assert (state, "ahead" in detail, "NTP" in hint) == ("WARN", True, True)


def test_17_something_else_at_a_nodes_address() -> None:
    with a_stranger() as address:
        found = check_door("node node-1 wire", Door(address, 300))
    assert found.state is State.FAIL
    assert found.hint


def test_18_too_few_open_files(doctor: Callable[..., Outcome]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        state, _, hint = finding(doctor(), "open files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (state, "ulimit -n" in hint) == ("WARN", True)


def test_19_no_shared_memory(tmp_path: Path) -> None:
    found = host_facts.shared_memory(tmp_path / "nothing-mounted")
    assert (found.state, "fall back to TCP" in found.hint) == (State.WARN, True)


def _installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    true_version = host_facts.version
    names = {name.replace("_", "-"): number for name, number in versions.items()}
    monkeypatch.setattr(host_facts, "version", lambda name: names.get(name) or true_version(name))


def test_20_client_and_server_of_two_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, saltern_server="0.0.1")
    found = next(iter(host_facts.packages()))
    assert (found.state, "same version" in found.hint) == (State.WARN, True)


def test_21_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_facts, "_DEPENDENCIES", ("grpcio", "no-such-package-of-ours"))
    _, found = host_facts.packages()
    assert (found.state, found.hint) == (State.FAIL, "pip install no-such-package-of-ours")


def test_22_a_vllm_that_was_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, vllm="0.19.1")
    (found,) = host_facts.integrations()
    assert (found.state, "0.32" in found.detail) == (State.WARN, True)


def test_23_a_stack_that_was_killed(offline: Saltern, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    run = {"control_endpoint": endpoint, "admin_api_key_file": "admin.key", "pid": 2**22 + 1, "nodes": []}
    (folder / "run.json").write_text(json.dumps(run))
    state, detail, hint = finding(offline("doctor", "-o", "json", "--data-dir", str(folder)), "configuration")
    assert (state, "ended without a word" in detail, "saltern up" in hint) == ("FAIL", True, True)


def _node(number: int, **fields: object) -> Node:
    fields = {"state": Node.STATE_LIVE, "wire_endpoint": f"10.0.0.{number}:7701", **fields}
    return Node(name=f"nodes/node-{number}", dram_capacity_bytes=GIB, **fields)  # type: ignore[arg-type]


def _of(*nodes: Node, is_control_local: bool = False) -> list[Finding]:
    return list(deployment_facts.of_nodes(nodes, is_control_local=is_control_local))


def test_24_nodes_that_send_clients_to_themselves() -> None:
    near = _node(1, wire_endpoint="127.0.0.1:7701")
    (found,) = _of(near)
    assert (found.state, "--advertise-host" in found.hint) == (State.WARN, True)
    assert _of(near, is_control_local=True) == []


def test_25_two_nodes_at_one_address() -> None:
    (found,) = _of(_node(1), _node(2, wire_endpoint="10.0.0.1:7701"), _node(3))
    assert (found.check, "--advertise-host" in found.hint) == ("nodes node-1, node-2", True)


def test_26_a_node_that_lags_and_one_that_is_late() -> None:
    lagging, late = _of(_node(1, policy_lag=3), _node(2, state=Node.STATE_LATE))
    assert "3 versions behind" in lagging.detail
    assert "did not report" in late.detail


def test_27_more_reserved_than_is_there() -> None:
    usages = [Usage(tenant="tenants/a", tiers=[TierUsage(tier=TIER_DRAM, reserved_bytes=GIB + 1)])]
    both = [_node(1), _node(2)]
    assert deployment_facts.of_memory(both, usages).state is State.OK
    found = deployment_facts.of_memory([both[0], _node(2, state=Node.STATE_LOST)], usages)
    assert (found.state, "lost nodes" in found.hint) == (State.WARN, True)


def test_28_a_key_that_has_ended() -> None:
    now = datetime(2026, 11, 30, tzinfo=UTC)
    key = ApiKey(name="apiKeys/old")
    key.expire_time.FromDatetime(now - timedelta(days=1))
    (found,) = deployment_facts.of_keys([key, ApiKey(name="apiKeys/lasting")], now)
    assert (found.state, found.detail) == (State.WARN, "ended: old")


def test_nothing_is_planted(doctor: Callable[..., Outcome], stack: Stack, writer: str) -> None:
    """What the others look for is not found where it is not: the stack of these tests is well configured."""
    for arguments in ((), ("--api-key-file", writer, "--namespace", "chat")):
        shown = doctor(*arguments)
        found = {one["check"] for one in json.loads(shown.out)["checks"] if one["state"] != "OK"}
        assert found <= {"quotas", "tenants", "API keys"}, "other tests' tenants may have none, on purpose"
        assert shown.code == 0
    assert stack.control in doctor().out
