"""The audit trail: a row for every administrative act, in the transaction of the act, and for denied attempts (I11)."""

from controlplane.audit.denials import DenialLog
from controlplane.audit.trail import Act, record, record_many, to_chained_record

__all__ = ["Act", "DenialLog", "record", "record_many", "to_chained_record"]
