"""What those who watch the control plane are told of its trust: audit chains, their checkpoints, its wrapping keys."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.audit.checkpoints import CheckpointWriter
from controlplane.core.readiness import Finding
from controlplane.key_encryption.keeper import KeyEncryptionKeeper


class TrustWatch(Collector):
    """Reads what the writer of checkpoints and the keeper of key-encryption keys say of themselves."""

    def __init__(self, signing: CheckpointWriter, wrapping: KeyEncryptionKeeper) -> None:
        self._signing = signing
        self._wrapping = wrapping

    def collect(self) -> Iterator[Metric]:
        """Metrics, at each scrape."""
        signing, wrapping = self._signing, self._wrapping
        yield GaugeMetricFamily(
            "saltern_control_audit_chains_broken",
            "Audit chains that were changed behind the service, or whose checkpoints were; not signed any more.",
            len(signing.broken),
        )
        yield CounterMetricFamily(
            "saltern_control_audit_checkpoint_failures",
            "Times that checkpoints could not be written.",
            signing.failures,
        )
        yield GaugeMetricFamily(
            "saltern_control_audit_checkpoint_success_timestamp_seconds",
            "When every chain that had moved was signed last, Unix time; 0 for never.",
            signing.last_success_s,
        )
        yield GaugeMetricFamily(
            "saltern_control_key_encryption_failing",
            "1 while key-encryption keys cannot be looked after.",
            int(bool(wrapping.failure)),
        )
        yield GaugeMetricFamily(
            "saltern_control_kms_failing",
            "1 while the key management service is not well.",
            int(bool(wrapping.kms_failure)),
        )

    def findings(self) -> tuple[Finding, ...]:
        """What ``/readyz`` says of it; none of it is a reason to send calls elsewhere."""
        found = []
        signing, wrapping = self._signing, self._wrapping
        if signing.broken:
            chains = ", ".join(sorted(signing.broken)[:5])
            found.append(
                Finding(
                    "AUDIT_CHAIN_BROKEN", f"changed behind the service, and not signed: {chains}; treat as an incident"
                )
            )
        if signing.failure:
            found.append(Finding("CHECKPOINTS_FAILING", f"audit chains are not signed: {signing.failure}"))
        if wrapping.failure:
            found.append(Finding("KEY_ENCRYPTION_FAILING", f"key-encryption keys: {wrapping.failure}"))
        if wrapping.kms_failure:
            found.append(Finding("KMS_FAILING", f"the next start would fail: {wrapping.kms_failure}"))
        return tuple(found)
