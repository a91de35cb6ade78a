"""The connector's smaller parts: opening, identity, memory, counts, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from saltern.client import Client
from saltern.errors import FailedPreconditionError, NotFoundError, UnavailableError
from saltern.transport.memory import RegisteredBuffer, address_of
from saltern.vllm import tenancy
from saltern.vllm.fingerprint import EngineFacts
from saltern.vllm.identity import Adapter, Identity
from saltern.vllm.layout import ChainLayout
from saltern.vllm.pages import HostPages, Move, Region
from saltern.vllm.staging import StagingArea
from saltern.vllm.stats import COUNTERS, DURATIONS, Tally, merged, summary
from saltern.vllm.tenancy import InstanceTenancy, OpeningClient, Ticket
from saltern.vllm.tensors import regions_of
from saltern.vllm.worker import NoLoads
from tests.clients.vllm.halves import client_of
from tests.clients.vllm.test_fingerprint import FACTS
from tests.support.static_node import MIB, static_node, tenant_policy

# ---- importing -------------------------------------------------------------------------------------------------------


def test_nothing_but_the_connector_itself_needs_an_engine() -> None:
    needs_engine = {"connector", "cuda_pages", "prometheus"}
    folder = Path(tenancy.__file__).parent
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem not in {*needs_engine, "__init__"})
    script = f"""
import sys
import saltern.vllm
for name in {names!r}:
    __import__("saltern.vllm." + name)
print(sorted({{"vllm", "torch", "numpy"}} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    assert ran.stdout.strip() == "[]"


# ---- tickets and opening ---------------------------------------------------------------------------------------------


def test_a_ticket_never_shows_its_secret() -> None:
    ticket = Ticket("acme", secret="eyJ-very-secret")
    shown = f"{ticket} {ticket!r} {ticket.__rich_repr__()} {[ticket]} {ticket.connection}"
    assert "secret" not in shown
    assert ticket == Ticket("acme", secret="eyJ-very-secret")
    assert ticket != Ticket("acme", secret="another")


@pytest.fixture
def client() -> Iterator[Client]:
    with (
        static_node({"acme": tenant_policy(limit_bytes=MIB)}, dram_bytes=32 * MIB) as node,
        client_of(node) as opened,
    ):
        yield opened


def test_i10_a_client_that_cannot_be_opened_is_tried_again_until_it_can(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tenancy, "_RETRY_FIRST_S", 0.001)
    attempts: list[int] = []
    opened = threading.Event()

    def open_client() -> Client:
        attempts.append(1)
        if len(attempts) < 4:
            raise UnavailableError("the control plane does not answer", reason="CONTROL_PLANE_UNAVAILABLE")
        opened.set()
        return client

    opening = OpeningClient(open_client, "namespace 'chat'")
    assert opened.wait(30)
    while opening.get() is None:
        pass
    assert opening.get() is client
    assert opening.error is None
    said = [record for record in caplog.records if "cannot open" in record.getMessage()]
    assert len(said) == 1, "one line for one reason"
    opening.close()
    assert opening.get() is None


def test_a_client_that_opens_after_the_end_is_closed(client: Client) -> None:
    go_on, opening_now = threading.Event(), threading.Event()

    def open_client() -> Client:
        opening_now.set()
        assert go_on.wait(30)
        return client

    opening = OpeningClient(open_client, "namespace 'chat'")
    assert opening_now.wait(30)
    opening.close()
    go_on.set()
    opening._thread.join(30)
    assert opening.get() is None
    with pytest.raises(FailedPreconditionError, match="closed"):
        client.allocate(1)


def test_in_instance_mode_everybody_has_the_same_ticket_unless_a_salt_is_required(client: Client) -> None:
    for required in (False, True):
        one = InstanceTenancy(lambda: client, what="it", require_cache_salt=required, wait_s=30)
        assert one.ticket_for("s", None) == one.ticket
        assert one.ticket_for(None, {"token": "x"}) == (None if required else one.ticket)
        assert one.ticket_for("", None) == (None if required else one.ticket)
        assert one.client(one.ticket) is client
        assert one.client(Ticket("stranger")) is None
    one.close()


# ---- identity --------------------------------------------------------------------------------------------------------


def test_i10_until_the_weights_are_read_there_are_no_names(tmp_path: Path) -> None:
    go_on = threading.Event()

    def facts() -> EngineFacts:
        assert go_on.wait(30)
        return FACTS

    identity = Identity(facts, ChainLayout(16), None)
    assert not identity.wait(0)
    assert identity.bindings(None) == ()
    assert identity.bindings(Adapter(str(tmp_path), 1)) == ()
    go_on.set()
    assert identity.wait(30)
    assert len(identity.bindings(None)) == 1


def test_weights_that_cannot_be_read_are_told() -> None:
    def facts() -> EngineFacts:
        raise NotFoundError("no weights", reason="NO_WEIGHTS")

    identity = Identity(facts, ChainLayout(16), None)
    assert identity.wait(30)
    assert isinstance(identity.error, NotFoundError)
    assert identity.bindings(None) == ()


def test_adapters_have_names_of_their_own_and_one_that_is_not_there_has_none(tmp_path: Path) -> None:
    identity = Identity(lambda: FACTS, ChainLayout(16, groups=2), None)
    assert identity.wait(30)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"low rank")
    tuned, base = identity.bindings(Adapter(str(tmp_path), 1)), identity.bindings(None)
    assert len({*tuned, *base}) == 4
    assert identity.bindings(Adapter(str(tmp_path / "nowhere"), 2)) == ()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"other low rank")
    assert identity.bindings(Adapter(str(tmp_path), 1)) == tuned, "the engine still has what it has loaded"
    assert not {*identity.bindings(Adapter(str(tmp_path), 3))} & {*tuned, *base}
    identity.renew()
    assert not {*identity.bindings(None), *identity.bindings(Adapter(str(tmp_path), 1))} & {*tuned, *base}


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass
class Tensor:
    """The shape of a tensor in memory, as torch tells it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    item_bytes: int = 2
    device: Any = field(default=None)

    def __post_init__(self) -> None:
        dense = [1]
        for size in reversed(self.shape[1:]):
            dense.append(dense[-1] * size)
        self.strides = self.strides or tuple(reversed(dense))

    def stride(self, dimension: int | None = None) -> Any:
        return self.strides if dimension is None else self.strides[dimension]

    def element_size(self) -> int:
        return self.item_bytes

    def data_ptr(self) -> int:
        return 4096


def _region(tensor: Tensor, blocks: int) -> Region:
    [region] = regions_of(["layer"], {"layer": tensor}, blocks)
    return region


def test_pages_are_found_whatever_the_order_of_their_dimensions() -> None:
    plain = Tensor((10, 4, 16, 64))
    assert _region(plain, 10) == Region(4096, 8192, 8192, 10)
    permuted = Tensor((10, 4, 16, 64), (4096, 64, 256, 1))
    assert _region(permuted, 10) == Region(4096, 8192, 8192, 10)
    interleaved = Tensor((10, 4, 16, 64), (3 * 4096, 1024, 64, 1))
    assert _region(interleaved, 10) == Region(4096, 3 * 8192, 8192, 10)
    one_head = Tensor((10, 1, 16, 576), (9216, 777, 576, 1))
    assert _region(one_head, 10) == Region(4096, 18432, 18432, 10)


def test_kernel_blocks_that_make_up_a_block_are_one_page() -> None:
    assert _region(Tensor((40, 4, 4, 64)), 10) == Region(4096, 8192, 8192, 10)


@pytest.mark.parametrize(
    ("tensor", "blocks"),
    [
        (Tensor((10, 4, 16, 64), (4096, 2 * 1024, 64, 1)), 10),
        (Tensor((2, 10, 16, 64)), 10),
        (Tensor((40, 4, 4, 64), (2048, 256, 64, 1)), 10),
        (Tensor((41, 4, 4, 64)), 10),
    ],
)
def test_i7_pages_that_are_not_whole_in_memory_are_refused(tensor: Tensor, blocks: int) -> None:
    with pytest.raises(FailedPreconditionError, match="not whole in memory"):
        _region(tensor, blocks)


def test_a_block_outside_the_cache_is_never_touched() -> None:
    with RegisteredBuffer(4096, shared=False) as cache, RegisteredBuffer(4096, shared=False) as other:
        pages = HostPages([[Region(address_of(cache.view), 1024, 1024, 4)]])
        for block_id in (-1, 0, 4, 1 << 40):
            with pytest.raises(AssertionError, match="no block"):
                pages.copy_in([Move(0, block_id, address_of(other.view))])
            with pytest.raises(AssertionError, match="no block"):
                pages.copy_out([Move(0, block_id, address_of(other.view))])


def test_slots_are_given_once_and_come_back() -> None:
    area = StagingArea(1000, 4096, shared=False)
    taken = area.take(10)
    assert sorted(taken) == [0, 1, 2, 3]
    assert area.take(1) == []
    views = [area.view(slot, 1000) for slot in taken]
    assert {address_of(view) for view in views} == {area.address_of(slot) for slot in taken}
    area.give_back(taken[:1])
    assert area.take(3, wait_s=30) == taken[:1]
    waiting = threading.Timer(0.01, area.give_back, [taken[1:]])
    waiting.start()
    assert len(area.take(3, wait_s=30)) == 3
    waiting.join()
    del views
    area.close()


def test_an_area_holds_one_entry_at_least() -> None:
    area = StagingArea(100_000, 4096, shared=False)
    assert area.slots == 1
    area.close()


# ---- counts ----------------------------------------------------------------------------------------------------------


def test_counts_of_several_add_up_and_durations_are_bounded() -> None:
    tally = Tally()
    tally.add(load_blocks=2, save_blocks=0)
    tally.took("load_seconds", 0.5)
    first = tally.take()
    assert first == {"load_blocks": 2, "load_seconds": [0.5]}
    assert tally.take() == {}
    total = merged(first, {"load_blocks": 3, "load_seconds": [1.5], "save_blocks": 1})
    assert summary(total) == {"load_blocks": 5, "load_seconds": 1.0, "save_blocks": 1}
    for _ in range(5000):
        tally.took("load_seconds", 0.1)
    assert len(merged(tally.take(), total)["load_seconds"]) == 1000


def test_every_name_is_told_apart_and_says_what_it_counts() -> None:
    names = [metric.name for metric in (*COUNTERS, *DURATIONS)]
    assert len(set(names)) == len(names)
    assert all(metric.help.endswith(".") for metric in (*COUNTERS, *DURATIONS))


def test_a_rank_without_cache_reports_each_load_as_failed_and_once() -> None:
    from saltern.vllm.metadata import LoadJob, StepWork

    rank = NoLoads()
    rank.start_loads(StepWork(loads=(LoadJob("r", 3, 1, ((7, 8),)),)))
    results = rank.take_load_results()
    assert (results.done, results.failed, results.invalid_block_ids) == ({"r"}, {"r"}, {7, 8})
    assert rank.take_load_results().done == set()


def test_a_steps_work_reaches_the_workers_of_other_processes_whole_and_shows_no_secret() -> None:
    import pickle

    from saltern.vllm.metadata import ChainUpdate, LoadJob, SaveJob, StepWork

    work = StepWork(
        forgotten=("old",),
        chains=(ChainUpdate("r", 0, (b"h" * 32,), Ticket("acme", secret="eyJ-token"), (b"b" * 32,), 1),),
        loads=(LoadJob("r", 4, 1, ((7, 8), (0, 9))),),
        saves=(SaveJob("s", (2, 3), ((5, 6),)),),
    )
    assert pickle.loads(pickle.dumps(work)) == work
    assert "eyJ-token" not in repr(work)
