"""What the audit trail says of a closed hour: SHA-256 over the CSV lines of its records.

The records of tenants come first, those of namespaces after them, each ordered by tenant, uid and namespace, as an
export writes them. So a bill is checked with the export of its hours and the signed audit trail alone.
"""

from __future__ import annotations

import hashlib

from saltern.admin.v1 import usage_pb2
from saltern.billing.columns import csv_line, to_row


class RecordsDigest:
    """Add every record of an hour, in order."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self.records = 0

    def add(self, record: usage_pb2.UsageRecord) -> None:
        """Add the next record."""
        self._sha256.update(csv_line(to_row(record)).encode())
        self.records += 1

    def hexdigest(self) -> str:
        """64 hexadecimal digits."""
        return self._sha256.hexdigest()
