"""Books of nodes that answer, are started anew, or tell nothing any more: theirs is then what they last told."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

import pytest

from saltern.errors import UnavailableError
from saltern.replay.measured.cluster import Cluster
from saltern.replay.measured.node_books import NodeBooks


class Node:
    """A metrics page of one tenant, as ``saltern serve node`` writes it; no two are the same."""

    def __init__(self, name: str) -> None:
        self.name, self.figures = name, {"get_bytes_total": 0, "used_bytes": 0}
        self._pages = 0
        node = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = node.page()
                self.send_response(200)
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.metrics_endpoint = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def page(self) -> bytes:
        self._pages += 1
        lines = [f'saltern_node_{name}{{tenant="t",tier="dram"}} {value}' for name, value in self.figures.items()]
        return "\n".join([*lines, f"saltern_node_pages {self._pages}", ""]).encode()

    def fall_silent(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


class Nodes:
    """As much of a cluster as books look at."""

    def __init__(self) -> None:
        self.nodes = self.running = [Node("first"), Node("second")]

    def note(self, *figures: Mapping[str, int]) -> None:
        for node, some in zip(self.nodes, figures, strict=True):
            node.figures.update(some)


@pytest.fixture
def cluster() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    for node in nodes.nodes:
        node.fall_silent()


def read_bytes(books: NodeBooks) -> dict[str, int]:
    return {name: node.read_bytes for name, node in books.sums().nodes().items()}


def test_a_node_that_tells_nothing_any_more_has_what_it_last_told(cluster: Nodes) -> None:
    books = NodeBooks(cast("Cluster", cluster))
    cluster.note({"get_bytes_total": 5}, {"get_bytes_total": 7})
    books.begin()
    cluster.note({"get_bytes_total": 15, "used_bytes": 100}, {"get_bytes_total": 27, "used_bytes": 50})
    assert books.held_bytes() == {"t": 150}
    assert (read_bytes(books), books.sums().error) == ({"first": 10, "second": 20}, None)
    cluster.note({"get_bytes_total": 99, "used_bytes": 999}, {"get_bytes_total": 28, "used_bytes": 60})
    cluster.nodes[0].fall_silent()
    assert books.held_bytes() == {"t": 160}
    sums = books.sums()
    assert sums.error is not None and sums.error.reason == "NODE_NOT_ANSWERING"
    assert sums.held_bytes() == {"t": 160}
    assert read_bytes(books) == {"first": 10, "second": 21}


def test_limits_are_there_once_nodes_together_have_them(cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saltern.replay.measured.node_books._FRESH_TIMEOUT_S", 0.1)
    books = NodeBooks(cast("Cluster", cluster))
    cluster.note({"limit_bytes": 100}, {"limit_bytes": 0})
    with pytest.raises(UnavailableError, match="limit of tenant 't'"):
        books.wait_for_limits({"t": 200})
    cluster.note({"limit_bytes": 100}, {"limit_bytes": 100})
    books.wait_for_limits({"t": 200})


def test_what_a_node_counted_before_its_process_ended_stays(cluster: Nodes) -> None:
    books = NodeBooks(cast("Cluster", cluster))
    books.begin()
    cluster.note({"get_bytes_total": 10}, {"get_bytes_total": 20})
    books.close(cluster.running)  # type: ignore[arg-type]
    cluster.note({"get_bytes_total": 1}, {"get_bytes_total": 2})  # as new processes count
    assert read_bytes(books) == {"first": 11, "second": 22}


def test_where_one_node_is_silent_no_books_are_closed(cluster: Nodes) -> None:
    books = NodeBooks(cast("Cluster", cluster))
    books.begin()
    cluster.note({"get_bytes_total": 10}, {"get_bytes_total": 20})
    books.held_bytes()
    cluster.nodes[1].fall_silent()
    with pytest.raises(UnavailableError):
        books.close(cluster.running)  # type: ignore[arg-type]
    assert read_bytes(books) == {"first": 10, "second": 20}, "each of them once"
