"""Schema migrations, run from code: ``migrations.upgrade(url)``. See ``run``."""

from migrations.run import current_revision, downgrade, head_revision, upgrade

__all__ = ["current_revision", "downgrade", "head_revision", "upgrade"]
