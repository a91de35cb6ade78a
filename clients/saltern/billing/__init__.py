"""Bills from usage records: stable columns, prices, and the digests that the audit trail has of closed hours."""
