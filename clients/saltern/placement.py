"""Which node holds what: rendezvous hashing (Thaler and Ravishankar, 1998): a lost node moves only its own share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from saltern.credentials import NodeEndpoint
from saltern.errors import UnavailableError
from saltern.keys import frame
from saltern.names import NamespaceId


def place_namespace(namespace: NamespaceId, nodes: Sequence[NodeEndpoint]) -> NodeEndpoint:
    """The node of a namespace: the one with the highest BLAKE2b of (namespace, node id).

    For now the whole namespace lives on one node; spreading it over several by parts of a chain comes with placement.

    Raises:
        UnavailableError: there are no nodes.
    """
    if not nodes:
        raise UnavailableError(
            f"no live node serves namespace {namespace!r}",
            reason="NO_LIVE_NODE",
            hint="start a node, or look at `saltern node list`",
        )
    return max(nodes, key=lambda node: hashlib.blake2b(frame(namespace, node.node_id), digest_size=16).digest())
