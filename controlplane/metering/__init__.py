"""Metering: what tenants used in each hour, from the reports of nodes to records that are never changed again.

::

    a node's report -> readings -> controlplane.core.metering -> intake   meters and open hours, with the report
                                                                closing  open hours -> records, once an hour
                                                                records  both, read for whoever may
"""

from __future__ import annotations

from controlplane.metering.closing import HourCloser
from controlplane.metering.intake import MeterIntake, Registration
from controlplane.metering.records import RecordQuery, read_records

__all__ = ["HourCloser", "MeterIntake", "RecordQuery", "Registration", "read_records"]
