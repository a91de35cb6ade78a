"""The metrics door of a running node: what it tells, whom it tells apart, and what hostile callers get."""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.metrics.catalog import FAMILIES, STANDARD_NAMES
from dataplane.metrics.labels import OTHER
from dataplane.settings import SessionLimits, SsdSettings
from saltern.errors import UnauthenticatedError
from saltern.http_door import CONNECTIONS_MAX, HEAD_MAX_BYTES
from tests.dataplane.test_draining import begin_put
from tests.support.scraping import Scrape, ask, readiness
from tests.support.ssd_node import FaultyFiles
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy
from tests.support.waiting import wait_until
from tests.support.wire_client import block, connect_tcp, connect_unix, ends_unheard, key

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.fixture
def node() -> Iterator[StaticNode]:
    tenants = {
        "acme": tenant_policy(limit_bytes=MIB, reserved_bytes=MIB // 2),
        "blue": tenant_policy(limit_bytes=MIB),
    }
    with static_node(tenants, dram_bytes=4 * MIB, metrics_tenants_max=10) as running:
        yield running


def fresh(node: StaticNode, **expected: float) -> Scrape:
    """A page that shows what has just happened: the last one is served again for a moment."""
    found: list[Scrape] = []

    def shows() -> bool:
        found.append(Scrape(node.metrics_endpoint))
        return all(found[-1].total(name) == value for name, value in expected.items())

    wait_until(shows)
    return found[-1]


def test_what_tenants_did_is_counted_under_their_names(node: StaticNode) -> None:
    token = node.token("acme", "chat")
    with connect_tcp(node) as client, connect_unix(node) as other:
        client.hello(token)
        other.hello(node.token("blue", "chat"))
        client.put({key(1): block(1), key(2): block(2)})
        client.get(key(1), key(3))
        client.lookup(key(1))
        client.delete(key(2))
        assert client.put({key(4): bytes(MIB + 1)}).errors
        page = fresh(node, puts_refused_total=1)
        assert page.value("get_hits_total", tenant="acme") == 1
        assert page.value("get_misses_total", tenant="acme") == 1
        assert page.value("put_bytes_total", tenant="acme") == 8192
        assert page.value("puts_refused_total", tenant="acme", reason="ENTRY_TOO_LARGE") == 1
        assert page.value("get_hits_total", tenant="blue") == 0
        assert page.value("used_bytes", tenant="acme", tier="dram") == 4096
        assert page.value("reserved_bytes", tenant="acme", tier="dram") == MIB // 2
        assert page.value("lent_bytes", tenant="acme", tier="dram") == MIB // 2 - 4096
        assert page.value("arena_free_bytes") == 4 * MIB - 4096
        assert page.value("sessions", transport="tcp") == page.value("sessions", transport="shm") == 1
        assert page.value("tenant_sessions", tenant="blue") == 1
        for operation, count in (("get", 1), ("put", 2), ("lookup", 1), ("delete", 1), ("session", 1)):
            labels = {"transport": "tcp", "operation": operation}
            assert page.value("request_duration_seconds_count", **labels) == count
            assert page.value("request_duration_seconds_bucket", le="+Inf", **labels) == count
        assert page.value("tenant_requests_total", tenant="acme", operation="put") == 2
        assert token not in page.text
    wait_until(lambda: node.session_count() == 0)
    page = fresh(node, sessions=0)
    assert page.value("sessions_closed_total", transport="tcp", reason="CLIENT_LEFT") == 1


def test_refusals_and_connections_that_come_to_nothing_are_counted_by_reason(node: StaticNode) -> None:
    with connect_tcp(node) as client:
        now_s = int(time.time())
        with pytest.raises(UnauthenticatedError, match="expired"):
            client.hello(node.token("acme", "chat", issued_at_s=now_s - 700, expires_at_s=now_s - 100))
    with connect_tcp(node) as client:
        client.sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        assert client.error().reason == "BAD_MAGIC"
    page = fresh(node, connections_turned_away_total=2)
    assert page.value("connections_turned_away_total", transport="tcp", reason="BAD_MAGIC") == 1
    assert page.value("requests_refused_total", transport="tcp", reason="TOKEN_EXPIRED") == 1


def test_evictions_tell_the_cause_and_who_took(node: StaticNode) -> None:
    node.apply({"acme": tenant_policy(limit_bytes=4 * MIB), "blue": tenant_policy(limit_bytes=2 * MIB)})
    with connect_tcp(node) as acme, connect_tcp(node) as blue:
        acme.hello(node.token("acme", "chat"))
        blue.hello(node.token("blue", "chat"))
        for number in range(4):
            acme.put({key(number): block(number, MIB)})
        blue.put({key(9): block(9, MIB)})
    page = fresh(node, taken_bytes_total=MIB)
    assert page.value("evictions_total", tenant="acme", cause="neighbour") == 1
    assert page.value("taken_bytes_total", tenant="blue") == MIB
    assert page.value("displaced_bytes_total", tenant="acme", by="blue") == MIB


@pytest.mark.parametrize("openmetrics", [False, True])
def test_every_name_is_documented_and_every_documented_name_is_exposed(node: StaticNode, openmetrics: bool) -> None:
    rows = re.findall(r"^\| `(saltern_node_\w+)` \| (\w+) \| ([^|]*) \| [^|]* \| ([^|]*) \|", DOCS.read_text(), re.M)
    documented = {name: (kind, re.findall(r"`(\w+)`", labels), text) for name, kind, labels, text in rows}
    assert documented == {f.exposed_name: (f.kind, list(f.labels), f.help) for f in FAMILIES}
    assert len(rows) == len(FAMILIES)
    page = Scrape(node.metrics_endpoint, openmetrics=openmetrics)
    declared = set(re.findall(r"^# TYPE (\w+)", page.text, re.M))
    expected = {f.exposed_name for f in FAMILIES} | set(STANDARD_NAMES)
    if openmetrics:
        expected = {re.sub(r"_(total|info)$", "", name) for name in expected}
        assert page.text.endswith("# EOF\n")
    assert declared == expected
    assert all(name in DOCS.read_text() for name in STANDARD_NAMES)
    by_name = {f.exposed_name: f for f in FAMILIES}
    for metric in page.metrics:
        for sample in metric.samples:
            family = by_name.get(re.sub(r"_(bucket|sum|count)$", "", sample.name)) or by_name.get(sample.name)
            if family is not None:
                assert set(sample.labels) - {"le"} == set(family.labels)


def test_10_000_tenants_take_no_more_labels_than_allowed_and_sums_stay_exact() -> None:
    tenants = {f"tenant-{number}": tenant_policy(limit_bytes=MIB, namespaces=()) for number in range(10_000)}
    tenants |= {f"busy-{number}": tenant_policy(limit_bytes=MIB) for number in range(12)}
    with static_node(tenants, dram_bytes=32 * MIB, metrics_tenants_max=5) as node:
        for number in range(12):
            with connect_tcp(node) as client:
                client.hello(node.token(f"busy-{number}", "chat"))
                client.put({key(at): block(at) for at in range(number + 1)})
        page = Scrape(node.metrics_endpoint)
        named = page.label_values("tenant") - {OTHER}
        assert named == {f"busy-{number}" for number in range(7, 12)}
        assert page.value("tenants") == 10_012 and page.value("tenants_labelled") == 5
        assert page.total("used_bytes", tier="dram") == 4096 * 78
        assert page.total("limit_bytes", tier="dram") == MIB * 10_012
        assert page.total("puts_stored_total") == 78
        assert page.value("puts_stored_total", tenant="_other") == sum(range(1, 8))
        assert len(page.text) < 100_000


# ---- readiness


def test_a_node_is_ready_once_it_has_a_policy_and_not_while_it_drains() -> None:
    with static_node(apply_policy=False, metrics_tenants_max=10) as node, connect_tcp(node) as client:
        endpoint = node.metrics_endpoint
        assert readiness(endpoint) == (503, "starting", ["NO_POLICY"])
        assert ask(endpoint, "/livez").json == {"state": "alive"}
        assert Scrape(endpoint).value("health_state", state="starting") == 1
        node.apply({"acme": tenant_policy(limit_bytes=8 * MIB)})
        assert readiness(endpoint) == (200, "ready", [])
        client.hello(node.token("acme", "chat"))
        with connect_tcp(node) as slow:  # half of a request holds the node up while it drains
            slow.hello(node.token("acme", "chat"))
            slow.sock.sendall(b"SLTN")
            begin_put(node, client, block(1, MIB))
            node.stop()
            wait_until(lambda: readiness(endpoint)[1] == "draining")
            assert readiness(endpoint) == (503, "draining", ["DRAINING"])


def test_an_ssd_that_takes_no_writes_degrades_the_node_which_serves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FaultyFiles()
    monkeypatch.setattr("dataplane.node.Files", lambda: files)
    ssd = SsdSettings(folder=tmp_path / "ssd", capacity_bytes=64 * MIB, node_key_folder=tmp_path)
    tenants = {"acme": tenant_policy(limit_bytes=MIB, ssd_limit_bytes=32 * MIB)}
    with static_node(tenants, dram_bytes=8 * MIB, ssd=ssd, metrics_tenants_max=10) as node:
        assert readiness(node.metrics_endpoint) == (200, "ready", [])
        files.write_faults.extend([errno.ENOSPC] * 100)
        with connect_tcp(node) as client:
            client.hello(node.token("acme", "chat"))
            for number in range(64):
                client.put({key(number): block(number, 65536)})
            wait_until(lambda: readiness(node.metrics_endpoint)[1] == "degraded")
            status, _, reasons = readiness(node.metrics_endpoint)
            assert (status, reasons) == (200, ["SSD_READ_ONLY"])
            assert client.get(key(63)) == {key(63): block(63, 65536)}
        assert fresh(node, sessions=0).value("ssd_state", state="read-only") == 1


# ---- hostile callers


def raw(node: StaticNode) -> socket.socket:
    host, port = node.metrics_endpoint.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=30)


def answer_to(node: StaticNode, request: bytes) -> bytes:
    """Everything that comes back until the node closes the connection."""
    with raw(node) as sock:
        received = b""
        try:
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(65536):
                received += piece
        except ConnectionError:
            pass
        return received


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", 200),
        (b"GET /livez?verbose=1 HTTP/1.0\r\nAccept: */*\r\nX-Odd: \xff\r\n\r\n", 200),
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", 405),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (b"GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET http://elsewhere/metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", 400),
        (b"get /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n folded: header\r\n\r\n", 400),
        (b"GET /\x00 HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET /" + b"a" * 2 * HEAD_MAX_BYTES + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * HEAD_MAX_BYTES + b"\r\n", 431),
        (b"GET / HTTP/1.1", 0),
        (b"", 0),
    ],
)
def test_malformed_requests_get_a_status_or_nothing(node: StaticNode, request_bytes: bytes, status: int) -> None:
    received = answer_to(node, request_bytes)
    assert received.startswith(b"HTTP/1.1 %d " % status) if status else not received
    assert readiness(node.metrics_endpoint)[0] == 200


def test_head_tells_the_length_and_sends_no_body(node: StaticNode) -> None:
    received = answer_to(node, b"HEAD /livez HTTP/1.1\r\n\r\n")
    assert received.endswith(b"\r\n\r\n") and b"Content-Length: 19\r\n" in received


def test_connections_that_say_nothing_give_way_to_those_that_ask(node: StaticNode) -> None:
    idle = [raw(node) for _ in range(3 * CONNECTIONS_MAX)]
    try:
        for sock in idle[::2]:
            sock.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert readiness(node.metrics_endpoint)[0] == 200
        idle[0].settimeout(10)
        assert ends_unheard(idle[0]), "the oldest gave way"
    finally:
        for sock in idle:
            sock.close()


def test_a_caller_too_slow_with_its_request_is_answered_408(node: StaticNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saltern.http_door.HEAD_S", 0.1)
    with raw(node) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_many_at_once_share_one_collection(node: StaticNode) -> None:
    socks = [raw(node) for _ in range(CONNECTIONS_MAX // 2)]
    for sock in socks:
        sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    for sock in socks:
        received = b""
        while piece := sock.recv(65536):
            received += piece
        assert received.startswith(b"HTTP/1.1 200 ")
        sock.close()


def test_a_flood_of_sessions_shows_as_turned_away() -> None:
    with static_node(limits=SessionLimits(sessions_max=2), metrics_tenants_max=10) as node:
        with connect_tcp(node) as first, connect_tcp(node) as second:
            first.hello(node.token("acme", "chat"))
            second.hello(node.token("acme", "chat"))
            with connect_tcp(node) as third:
                assert third.error().reason == "TOO_MANY_SESSIONS"
            page = fresh(node, connections_turned_away_total=1)
            assert page.value("connections_turned_away_total", transport="tcp", reason="TOO_MANY_SESSIONS") == 1
