"""``saltern up --engine mooncake``: a whole stack over a real store."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.controlplane.test_up import up
from tests.support.mooncake_cluster import Cluster


def test_the_nodes_of_a_stack_keep_what_dram_gives_up_in_the_store(cluster: Cluster, reachable_tmp_path: Path) -> None:
    data_dir = reachable_tmp_path / "stack"
    master = str(cluster.settings.master)
    with up(data_dir, "--dram", "8MiB", "--ssd", "64MiB", "--engine", "mooncake", "--mooncake-master", master) as stack:
        stack.wait_ready()
        status, printed, _ = stack.end(signal.SIGINT)
    assert status in (0, 130) and f"64 MiB in the Mooncake store at {master}" in printed
    lines = map(json.loads, (data_dir / "log" / "node-1.log").read_text().splitlines())
    tiers = [line for line in lines if line["event"] == "ssd tier" and "engine" in line]
    assert [(line["engine"], line["state"]) for line in tiers] == [("mooncake", "ok")]
    assert (data_dir / "node-1" / "mooncake").is_dir() and not (data_dir / "node-1" / "ssd").exists()
