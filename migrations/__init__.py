"""Schema migrations, run from code: ``migrations.upgrade(url)``. See ``run``."""

from migrations.run import SCHEMA_QUERY, SchemaFit, current_revision, downgrade, head_revision, schema_fit, upgrade

__all__ = ["SCHEMA_QUERY", "SchemaFit", "current_revision", "downgrade", "head_revision", "schema_fit", "upgrade"]
