"""``saltern bench --transport rdma``: puts and gets over RDMA beside what perftest gets out of the same device."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from saltern.admin_client import AdminClient, read_api_key
from saltern.bench.case import OURS, Case, Contender, Role
from saltern.bench.cases import BATCH_BYTES, MIB, SIZES_BYTES, Blocks, each, size_label
from saltern.bench.cpu import CpuUse, measured
from saltern.bench.markdown import markdown_table
from saltern.bench.perftest import TOOL_OF, Link, find_tools, measure_gb_per_s
from saltern.bench.rdma_model import Costs
from saltern.client import Client
from saltern.demo.member import Member
from saltern.demo.stack import running_stack
from saltern.errors import FailedPreconditionError
from saltern.rdma import Device, DeviceChoice
from saltern.rdma.sysfs import is_software
from saltern.transport.opening import RDMA_DEVICE_VARIABLE
from saltern.transport.session import FRAME_BYTES
from saltern.wire import checksum

SCHEMA: Final = "saltern.bench-rdma/1"
#: Room for a batch while the one before it is still there.
_DRAM_BATCHES: Final = 2
_TINY_BYTES: Final = 64
_TINY_CALLS: Final = 20
_EMULATED: Final = "device {} is a driver without hardware: these figures show that the bench works, and no speed"


@dataclass(frozen=True, slots=True)
class RdmaReport:
    """One run.

    Attributes:
        device: port and GID that both were measured over.
        is_emulated: the device has no hardware, so that no figure means anything.
        cases: of each, ours comes first and perftest's tool second.
        costs: what the expected ratios are made of.
    """

    turns: int
    batch_bytes: int
    device: str
    is_emulated: bool
    cases: Sequence[RdmaCase]
    costs: Costs

    def as_json(self) -> dict[str, Any]:
        """The stable shape of ``rdma.json``, told in docs/rdma.md."""
        return {
            "schema": SCHEMA,
            "turns": self.turns,
            "batch_bytes": self.batch_bytes,
            "device": self.device,
            "is_emulated": self.is_emulated,
            "note": self.note,
            "sum_gb_per_s": self.costs.sum_gb_per_s,
            "cases": [case.as_json(self.costs) for case in self.cases],
        }

    @property
    def note(self) -> str:
        """What a reader must know before any figure; empty where there is nothing."""
        return _EMULATED.format(self.device.partition(":")[0]) if self.is_emulated else ""

    def write(self, output_dir: Path) -> Path:
        """Write ``rdma.json`` and ``rdma.md``; returns the path of the first."""
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir / "rdma.json"
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        tables = [markdown_table(*table) for table in self.tables()]
        path.with_suffix(".md").write_text("\n\n".join([self.note, *tables]).strip() + "\n", encoding="utf-8")
        return path

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        headings = ["GB/s", "ours", "perftest", "ratio", "expected ratio", "CPU s/GB, client + node"]
        return [(headings, [case.row(self.costs) for case in self.cases])]


@dataclass(frozen=True, slots=True)
class RdmaCase:
    """One operation with blocks of one length: ours beside the tool that does the same."""

    operation: str
    block_bytes: int
    case: Case

    @property
    def device_gb_per_s(self) -> float:
        return self.case.contenders[1].figure

    @property
    def ratio(self) -> float:
        return self.case.ratio(self.case.contenders[1])

    def expected_ratio(self, costs: Costs) -> float:
        return costs.expected_ratio(self.operation, self.device_gb_per_s, self.block_bytes)

    def row(self, costs: Costs) -> list[str]:
        ours, tool = self.case.contenders
        assert ours.cpu is not None
        figures = [self.ratio, self.expected_ratio(costs), ours.cpu.s_per_gb]
        return [self.case.name, f"{ours.figure:.3f}", f"{tool.figure:.3f} {tool.name}", *[f"{x:.2f}" for x in figures]]

    def as_json(self, costs: Costs) -> dict[str, Any]:
        ours, tool = self.case.contenders
        assert ours.cpu is not None
        return {
            "operation": self.operation,
            "block_bytes": self.block_bytes,
            "ours_gb_per_s": ours.seen,
            "tool": tool.name,
            "tool_gb_per_s": tool.seen,
            "ratio": self.ratio,
            "expected_ratio": self.expected_ratio(costs),
            "block_us": costs.block_s[self.operation, self.block_bytes] * 1e6,
            "cpu_s_per_gb": {"client": ours.cpu.client_s_per_gb, "node": ours.cpu.server_s_per_gb},
        }


def run_rdma_bench(turns: int, say: Callable[[str], None]) -> RdmaReport:
    """Measure on a private stack that is gone afterwards; ``say`` is called with what is being done.

    Raises:
        FailedPreconditionError: there is no device, no binding (``RDMA_*``) or no perftest (PERFTEST_MISSING); nothing
            was started then.
        SalternError: the stack did not start, the node could not use the device, or a put or get failed.
    """
    named = os.environ.get(RDMA_DEVICE_VARIABLE, "")
    if named == "off":
        raise FailedPreconditionError(
            f"{RDMA_DEVICE_VARIABLE} is off", reason="RDMA_OFF", hint="unset it, or name a device"
        )
    with Device(DeviceChoice.parse(named)) as device:
        tools = find_tools()
        chosen = f"{device.name}:{device.port}:{device.gid_index}"
        say(f"starting a private stack: Postgres, control plane, one node with RDMA device {chosen}")
        with (
            running_stack(
                dram_bytes=_DRAM_BATCHES * BATCH_BYTES, environment={"SALTERN_NODE_RDMA_DEVICE": chosen}
            ) as stack,
            AdminClient(stack.control, read_api_key(stack.admin_api_key_file)) as admin,
            Member.join(
                admin,
                tenant="bench-rdma",
                namespace="bench",
                limit_bytes=_DRAM_BATCHES * BATCH_BYTES,
                reserved_bytes=_DRAM_BATCHES * BATCH_BYTES,
                block_bytes=max(SIZES_BYTES),
                transport="rdma",
            ) as member,
        ):
            return measure_rdma(member.client, stack.node_pid, device, tools, turns=turns, say=say)


def measure_rdma(
    client: Client,
    node_pid: int,
    device: Device,
    tools: dict[str, str],
    *,
    turns: int,
    say: Callable[[str], None],
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    batch_bytes: int = BATCH_BYTES,
    calls: int = _TINY_CALLS,
) -> RdmaReport:
    """Measure ``client``, whose sessions go over ``device``, beside perftest on the same device.

    Args:
        node_pid: of the node, for what it takes of CPUs.
        tools: paths of the tools, from :func:`~saltern.bench.perftest.find_tools`.
        sizes_bytes: lengths of blocks; each divides ``batch_bytes``.
        calls: how many the cost of a block is measured with.

    Raises:
        SalternError: PERFTEST_FAILED, or a put or get failed.
    """
    cases: list[RdmaCase] = []
    block_s: dict[tuple[str, int], float] = {}
    for size_bytes in sizes_bytes:
        say(f"blocks of {size_label(size_bytes)}")
        block_s |= _block_costs(client, size_bytes, calls)
        blocks = Blocks(client, size_bytes, batch_bytes)
        of_size = list(_cases(blocks, node_pid, Link.of(device), tools))
        for each_case in of_size:  # puts come first, so that gets find what they read
            each_case.case.warm_up()
        for turn in range(turns):
            for each_case in of_size:
                each_case.case.turn(turn)
        blocks.close()
        cases += of_size
    costs = Costs(_sum_gb_per_s(batch_bytes), block_s)
    return RdmaReport(turns, batch_bytes, str(device.chosen), is_software(device.name), cases, costs)


def _cases(blocks: Blocks, node_pid: int, link: Link, tools: dict[str, str]) -> Iterator[RdmaCase]:
    size_bytes, batch_bytes = blocks.views[0].nbytes, blocks.buffer.size_bytes
    for operation, tool in TOOL_OF.items():
        use = CpuUse()

        def ours(operation: str = operation, use: CpuUse = use) -> float:
            if operation == "put":
                blocks.delete()
            return batch_bytes / 1e9 / measured(use, node_pid, batch_bytes, getattr(blocks, operation))

        contenders = [
            Contender(OURS, Role.OURS, ours, use),
            Contender(tool, Role.LIMIT, partial(measure_gb_per_s, tools[tool], link, size_bytes, batch_bytes)),
        ]
        yield RdmaCase(operation, size_bytes, Case(f"RDMA {operation} {size_label(size_bytes)}", "GB/s", contenders))


def _block_costs(client: Client, size_bytes: int, calls: int) -> dict[tuple[str, int], float]:
    """What a block of this length costs besides its bytes; see :class:`~saltern.bench.rdma_model.Costs`."""
    count = max(1, FRAME_BYTES // size_bytes)
    blocks = Blocks(client, _TINY_BYTES, count * _TINY_BYTES)
    put_s = []
    for _ in range(calls):
        put_s += each(1, blocks.put)
        blocks.delete()
    blocks.put()
    get_s = each(calls, blocks.get)
    blocks.close()
    return {("put", size_bytes): median(put_s) / count, ("get", size_bytes): median(get_s) / count}


def _sum_gb_per_s(size_bytes: int) -> float:
    """How fast one thread takes checksums of entries that no cache holds."""
    memory = memoryview(bytearray(os.urandom(MIB)) * max(1, size_bytes // MIB))
    begin = time.perf_counter()
    for start in range(0, len(memory), MIB):
        checksum(memory[start : start + MIB])
    return len(memory) / 1e9 / (time.perf_counter() - begin)
