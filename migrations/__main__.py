"""``python -m migrations``: bring the schema of SALTERN_MIGRATION_DATABASE_URL to this release, and nothing else.

For a job before an upgrade, so that control planes need not hold the password of the role that owns the schema.
"""

from __future__ import annotations

import os
import sys

from migrations.run import current_revision, upgrade
from saltern.errors import SalternError

_VARIABLE = "SALTERN_MIGRATION_DATABASE_URL"


def main() -> int:
    """Exit status: 0 where the schema is that of this release now."""
    url = os.environ.get(_VARIABLE)
    if not url:
        sys.stderr.write(f"set {_VARIABLE} to the database, as the role that owns the schema\n")
        return 2
    try:
        before = current_revision(url)
        upgrade(url)
    except SalternError as error:
        sys.stderr.write(f"{error.reason}: {error}\n{error.hint}\n")
        return 1
    sys.stdout.write(f"schema {before or 'none'} -> {current_revision(url)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
