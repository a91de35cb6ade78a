"""The embedded database: a private PostgreSQL server that starts and ends with the stack. See ``launcher``."""

from controlplane.postgres.launcher import EmbeddedPostgres, PostgresConfig
from controlplane.postgres.roles import DATABASE_NAME, ROLE_NAMES, Role

__all__ = ["DATABASE_NAME", "ROLE_NAMES", "EmbeddedPostgres", "PostgresConfig", "Role"]
