"""The audit trail: a row for every administrative act, in the transaction of the act, and for denied attempts (I11)."""

from controlplane.audit.denials import DenialLog
from controlplane.audit.trail import record, to_chained_record

__all__ = ["DenialLog", "record", "to_chained_record"]
