"""What alembic runs for every command: hands it the open connection of ``migrations.run``."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from controlplane.db.models import Base

_connection = context.config.attributes["connection"]
assert isinstance(_connection, Connection), "run migrations through migrations.upgrade(url)"
# The caller's transaction is the migration's: alembic commits nothing by itself.
context.configure(connection=_connection, target_metadata=Base.metadata, transactional_ddl=True)
context.run_migrations()
