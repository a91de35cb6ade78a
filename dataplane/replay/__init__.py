"""The simulated engine of ``saltern replay``: the node's own core in virtual time, many nodes, routing and failures.

``simulation`` is the loop of events; ``node`` one cache node, ``fleet`` all of them under the client's placement;
``engine`` is what the command line finds. When requests come and which engine takes them is in :mod:`saltern.replay`.
"""
