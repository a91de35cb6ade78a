"""One recorded trace through the whole engine, against the golden file; ``make test-replay`` takes all of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from saltern.replay.results import Column
from saltern.traces.load import load_trace
from tests.replay.__main__ import served

pytestmark = pytest.mark.skipif("SALTERN_TRACES" not in os.environ, reason="SALTERN_TRACES names no folder of traces")


@pytest.mark.parametrize(("policy", "capacity_blocks"), [("fifo", 878), ("lru", 2196)])
def test_a_recorded_trace_has_its_golden_rate(policy: str, capacity_blocks: int) -> None:
    folder = Path(os.environ["SALTERN_TRACES"])
    golden = json.loads((folder / "golden_hit_rates.json").read_text())["traces"]["mc_synth"]
    expected = next(
        point["hit_rate"]
        for point in golden["points"]
        if (point["policy"], point["capacity_blocks"]) == (policy, capacity_blocks)
    )
    (result,) = served(load_trace(folder / golden["file"]), capacity_blocks, Column.SHARED, eviction=policy)
    assert round(result.hit_rate, 4) == expected
