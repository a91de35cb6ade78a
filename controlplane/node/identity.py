"""Who may serve as which node.

A node's word counts: what it registers is where clients send their blocks and what quotas are split by (I4), what it
reports goes into bills (I8), and a registration fences off the process that had the name before. So a key of the role
node is made for one node, and whoever steals it from one host is that host's node and no other (I1).
"""

from __future__ import annotations

from controlplane.caller import Caller
from saltern.errors import PermissionDeniedError
from saltern.names import NodeId


def require_node(caller: Caller, node: NodeId, *, allow_unbound: bool) -> None:
    """Refuse ``caller``, of the role node, unless its key is for ``node``.

    Args:
        allow_unbound: whether a key that is bound to no node is good for any: for the time in which a deployment that
            has such keys replaces them.

    Raises:
        PermissionDeniedError: NODE_KEY_OF_ANOTHER_NODE, NODE_KEY_UNBOUND. The same whether ``node`` exists or not.
    """
    if caller.node == node or (caller.node is None and allow_unbound):
        return
    if caller.node is None:
        raise PermissionDeniedError(
            "this API key of the role node is bound to no node, and the control plane takes only bound ones",
            reason="NODE_KEY_UNBOUND",
            hint=f"make one: saltern key create KEY --role node --node {node}; meanwhile the control plane takes this "
            "one with --allow-unbound-node-keys",
        )
    raise PermissionDeniedError(
        f"this API key is for node {caller.node}, not for {node}",
        reason="NODE_KEY_OF_ANOTHER_NODE",
        hint=f"start the node with --node-id {caller.node}, or give it a key that was made with --node {node}",
        metadata={"node": node},
    )
