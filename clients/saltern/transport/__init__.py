"""Transports: how entries travel between a client and a node. One interface (``Session``), two implementations."""
