"""The node of a noisy-neighbour run, in a process of its own; see :mod:`tests.support.node_process`.

Run as ``python -m tests.noisy.node_main CPUS``, CPUS a JSON list. One line of JSON says how to reach it; it serves
until its standard input ends.
"""

from __future__ import annotations

import json
import sys

import structlog

from tests.noisy.setting import CAPACITY_BYTES, FLOODER, RESERVED_BYTES, VICTIM, pin
from tests.support.static_node import static_node, tenant_policy


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    pin(json.loads(sys.argv[1]))
    tenants = {
        VICTIM: tenant_policy(limit_bytes=RESERVED_BYTES, reserved_bytes=RESERVED_BYTES),
        FLOODER: tenant_policy(limit_bytes=CAPACITY_BYTES),
    }
    with static_node(tenants, dram_bytes=CAPACITY_BYTES, prefault=True) as node:
        tokens = {tenant: node.token(tenant, "chat") for tenant in tenants}
        print(json.dumps({"wire": node.wire_endpoint, "shm": node.shm_path, "tokens": tokens}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
