"""What is measured: sizes, rates, and which process runs on which CPU."""

from __future__ import annotations

import os
from typing import Final

import msgspec

from saltern.client import Client
from saltern.credentials import NodeEndpoint, StaticCredentials
from saltern.keys import SaltKey

MIB: Final = 1024 * 1024
BLOCK_BYTES: Final = 64 * 1024
#: Blocks of one prompt, and prompts that the victim comes back to: 40 MiB, in a reservation of 80 MiB.
CHAIN_BLOCKS: Final = 8
CHAINS: Final = 80
RESERVED_BYTES: Final = 80 * MIB
#: The flooding tenant may have all of it; what the victim has reserved is taken from that.
CAPACITY_BYTES: Final = 256 * MIB
TIMES_THE_RATE: Final = 4
VICTIM, FLOODER = "victim", "flooder"
DEADLINE_MS: Final = 30_000.0


class Reach(msgspec.Struct, frozen=True):
    """How a client process gets to the node, and where it runs.

    Attributes:
        cpus: that the process may use; empty for any.
    """

    wire_endpoint: str
    shm_path: str
    token: str
    transport: str
    cpus: list[int]

    def client(self, sessions_max: int) -> Client:
        endpoint = NodeEndpoint("node-1", self.wire_endpoint, self.shm_path)
        credentials = StaticCredentials(
            self.token, namespace="chat", nodes=(endpoint,), salt_key=SaltKey(bytes(32)), model_fingerprint=b"model"
        )
        return Client.from_credentials(
            credentials, transport=self.transport, deadline_ms=DEADLINE_MS, sessions_max=sessions_max
        )


class Pins(msgspec.Struct, frozen=True):
    """CPUs of node, victim and flooder; empty for any."""

    node: list[int]
    victim: list[int]
    flooder: list[int]


def choose_pins() -> Pins:
    """The node and the victim on a CPU each; the flooder on others where there are some, else beside the victim.

    Never beside the node: what it takes from the node shall be what the node gives it.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) == 1:
        return Pins([], [], [])
    return Pins(cpus[:1], cpus[1:2], cpus[2:] or cpus[1:2])


def pin(cpus: list[int]) -> None:
    if cpus:
        os.sched_setaffinity(0, cpus)
