"""What an exchange gives, as values: a token, the salts of readable epochs, and where the nodes are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from saltern.keys import SaltKey
from saltern.names import NamespaceId, TenantId
from saltern.wire import ENTRY_MAX_BYTES


@dataclass(frozen=True, slots=True)
class NodeEndpoint:
    """How to reach one node.

    Attributes:
        node_id: identifier of the node.
        wire_endpoint: ``host:port`` of the wire protocol, or empty if it has none.
        shm_path: path of the unix socket of the shared-memory transport, or empty if it has none.
        host_id: what the node must answer for its host; empty accepts any.
        tls_server_name: what the node's certificate must be for; empty for a node that serves plain text.
        read_only: it is being emptied (cordoned, draining): it answers reads, and new blocks go elsewhere. No part of
            what a node *is*: sessions with it stay.
    """

    node_id: str
    wire_endpoint: str = ""
    shm_path: str = ""
    host_id: str = ""
    tls_server_name: str = ""
    read_only: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class SaltScopeChoice:
    """Whose salt to ask for: the narrower, the fewer callers find each other's blocks.

    Attributes:
        project, user, session: what the salt is narrowed to; within what the API key is bound to. A narrower salt never
            finds what a wider or another one has stored.
        sharing_group: ``tenants/{tenant}/sharingGroups/{group}``: the group's salt instead of the namespace's own.
    """

    project: str = ""
    user: str = ""
    session: str = ""
    sharing_group: str = ""


WHOLE_NAMESPACE = SaltScopeChoice()


@dataclass(frozen=True, slots=True)
class EpochSalt:
    """The salt key of one epoch; its repr does not show it."""

    epoch: int
    key: SaltKey = field(repr=False)


@dataclass(frozen=True, slots=True)
class Grant:
    """What an exchange gives; its repr shows neither token nor salt keys.

    Attributes:
        access_token: for nodes; verified by them, opaque here.
        expires_at_s: Unix seconds.
        salts: readable epochs, the current one last; empty where block keys are derived elsewhere.
        epoch: the epoch under which sessions are opened: the current one, or an older one, see ``for_epoch``.
        sharing_group_uid: names the sharing group at nodes, whose salts these are; empty outside of one.
        block_bytes: the largest entry of the namespace.
        nodes: live nodes that serve the namespace.
    """

    access_token: str = field(repr=False)
    expires_at_s: float
    tenant: TenantId
    namespace: NamespaceId
    nodes: tuple[NodeEndpoint, ...]
    salts: tuple[EpochSalt, ...] = ()
    epoch: int = 1
    model_fingerprint: bytes = b""
    block_tokens: int = 0
    block_bytes: int = ENTRY_MAX_BYTES
    sharing_group_uid: str = ""

    @property
    def older_epoch(self) -> int | None:
        """The newest of the epochs that are still readable besides the current one, or None."""
        return self.salts[-2].epoch if len(self.salts) > 1 else None

    def for_epoch(self, epoch: int) -> Grant:
        """The same grant, to open sessions under an older epoch."""
        return self if epoch == self.epoch else replace(self, epoch=epoch)
