"""Other stores beside ours in the same run.

Each peer lives in a virtual environment of its own (``build/bench/peers/NAME``), with its client, its server and a
small driver process (:mod:`saltern.bench.peers.drivers`) that measures one thing at a time when it is told to, so that
turns of peers and of ours alternate. Nothing of a peer is a dependency of ours.
"""
