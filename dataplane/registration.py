"""What a node tells the control plane of itself when it registers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from saltern.admin.v1 import quotas_pb2
from saltern.auth.v1 import auth_pb2
from saltern.node.v1 import node_pb2


@dataclass(frozen=True, slots=True)
class Registration:
    """Who the node is, where it listens, and what it has room for.

    Attributes:
        host_id: of the machine: clients with the same one may use ``shm_path``.
        ssd_capacity_bytes: 0 without an SSD tier.
        tls_server_name: the name in its certificate; empty without TLS.
        state_id: of its state folder: two processes with one node ID but other folders are told apart by it.
    """

    node_id: str
    wire_endpoint: str
    grpc_endpoint: str
    shm_path: str
    host_id: str
    dram_capacity_bytes: int
    ssd_capacity_bytes: int = 0
    tls_server_name: str = ""
    state_id: str = ""

    def request(self) -> node_pb2.RegisterNodeRequest:
        """As it is sent."""
        capacities = [node_pb2.TierCapacity(tier=quotas_pb2.TIER_DRAM, capacity_bytes=self.dram_capacity_bytes)]
        if self.ssd_capacity_bytes:
            capacities.append(node_pb2.TierCapacity(tier=quotas_pb2.TIER_SSD, capacity_bytes=self.ssd_capacity_bytes))
        return node_pb2.RegisterNodeRequest(
            node_id=self.node_id,
            endpoint=auth_pb2.NodeEndpoint(
                node_id=self.node_id,
                wire_endpoint=self.wire_endpoint,
                grpc_endpoint=self.grpc_endpoint,
                shm_path=self.shm_path,
                host_id=self.host_id,
                tls_server_name=self.tls_server_name,
            ),
            capacities=capacities,
            software_version=version("saltern-server"),
            state_id=self.state_id,
        )
