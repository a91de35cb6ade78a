"""The bench from beginning to end: a private stack, a tenant, turns of ours, the limits and the peers, a report."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from saltern.admin_client import AdminClient, read_api_key
from saltern.bench.authentication import authentication_cost
from saltern.bench.batches import large_batches
from saltern.bench.cases import BATCH_BYTES, MIB, SIZES_BYTES, Field, latencies, lookup_cases, transfer_cases
from saltern.bench.limits import BareSocket, Memcpy
from saltern.bench.network import enter_private_network
from saltern.bench.peers.catalogue import PEERS, Peer
from saltern.bench.peers.process import PeerError, PeerProcess
from saltern.bench.report import BenchReport, PeerNote
from saltern.demo.member import Member
from saltern.demo.stack import running_stack
from saltern.errors import FailedPreconditionError

DRAM_BYTES: Final = 2048 * MIB
LATENCY_COUNT: Final = 300


def run_bench(
    turns: int, peers: Sequence[Peer], left_out: dict[str, str], peers_dir: Path, say: Callable[[str], None]
) -> BenchReport:
    """Measure on a private stack that is gone afterwards.

    Args:
        turns: how often each contender is measured; the medians of that many are reported.
        peers: stores to measure beside ours; one that does not start is named in the report.
        left_out: why each other peer is not measured.
        peers_dir: where their environments are.
        say: called with what is being done.

    Raises:
        SalternError: the stack did not start, or a put or get of ours failed.
    """
    load_before = os.getloadavg()[0]
    reasons = dict(left_out)
    peers, private_network = _find_network(peers, reasons)
    with ExitStack() as resources:
        say("starting a private stack: Postgres, control plane, one node")
        stack = resources.enter_context(running_stack(dram_bytes=DRAM_BYTES, environment={}))
        admin = resources.enter_context(AdminClient(stack.control, read_api_key(stack.admin_api_key_file)))
        tcp, shm = (_member(resources, admin, door) for door in ("tcp", "shm"))
        running = _start_peers(resources, peers, peers_dir, reasons, say)
        field = Field(
            tcp=tcp.client,
            shm=shm.client,
            node_pid=stack.node_pid,
            bare=resources.enter_context(BareSocket()),
            memcpy=resources.enter_context(Memcpy(around_caches=False)),
            memcpy_around_caches=resources.enter_context(Memcpy(around_caches=True)),
            peers=running,
        )
        cases = [*transfer_cases(field), *lookup_cases(field)]
        say("warming up")
        for case in cases:
            case.warm_up()
        for turn in range(turns):
            say(f"turn {turn + 1} of {turns}")
            for case in cases:
                case.turn(turn)
        say("single blocks, large batches, authentication")
        latency = {client.transport: latencies(client, LATENCY_COUNT) for client in (tcp.client, shm.client)}
        batches = large_batches(tcp.client, running)
        authentication = authentication_cost(stack.wire_endpoint, tcp.exchange())
        say("stopping the stack")
    notes = [PeerNote(peer.peer.title, peer.version, peer.ways) for peer in running]
    notes += [PeerNote(PEERS[name].title, "", {}, reason) for name, reason in reasons.items()]
    return BenchReport(turns, BATCH_BYTES, private_network, load_before, cases, batches, latency, authentication, notes)


def _find_network(peers: Sequence[Peer], reasons: dict[str, str]) -> tuple[list[Peer], bool]:
    """Go where every peer may run; those that may not where we have to stay are given a reason instead."""
    if not any(peer.private_network for peer in peers):
        return list(peers), False
    try:
        enter_private_network()
    except FailedPreconditionError as error:
        reasons.update({peer.name: error.message for peer in peers if peer.private_network})
        return [peer for peer in peers if not peer.private_network], False
    return list(peers), True


def _start_peers(
    resources: ExitStack, peers: Sequence[Peer], peers_dir: Path, reasons: dict[str, str], say: Callable[[str], None]
) -> list[PeerProcess]:
    logs = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="saltern-bench-")))
    running = []
    for peer in peers:
        say(f"starting {peer.title}")
        try:
            process = PeerProcess(peer, peers_dir, logs / f"{peer.name}.log", BATCH_BYTES)
        except PeerError as error:
            reasons[peer.name] = error.message
        else:
            running.append(resources.enter_context(process))
    return running


def _member(resources: ExitStack, admin: AdminClient, transport: str) -> Member:
    """A tenant of its own, with half the node and a client."""
    member = Member.join(
        admin,
        tenant=f"bench-{transport}",
        namespace="bench",
        limit_bytes=DRAM_BYTES // 2,
        reserved_bytes=DRAM_BYTES // 2,
        block_bytes=max(SIZES_BYTES),
        transport=transport,
    )
    return resources.enter_context(member)
