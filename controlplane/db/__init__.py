"""The control plane's database: the tables (``models``) and the one way to use them (``session``)."""

from controlplane.db.session import Database, connect

__all__ = ["Database", "connect"]
