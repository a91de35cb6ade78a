"""What an operator sets for the SSD tier, and what the node reports of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataplane.commands import _ssd_settings
from dataplane.core.usage import NodeUsage, SsdCounters, SsdUsage, TenantCounters, TenantUsage
from dataplane.policy_codec import encode_usage
from dataplane.settings import MIB, SsdSettings
from saltern.admin.v1 import quotas_pb2
from saltern.errors import InvalidArgumentError
from saltern.names import TenantId


def test_the_tier_is_off_without_options_and_needs_folder_and_size() -> None:
    state_dir = Path("state")
    assert _ssd_settings(None, None, None, state_dir) is None
    assert _ssd_settings(Path("d"), "64MiB", "8MiB", state_dir) == SsdSettings(Path("d"), 64 * MIB, state_dir, 8 * MIB)
    for options in ((Path("d"), None, None), (None, "64MiB", None), (None, None, "8MiB")):
        with pytest.raises(InvalidArgumentError) as refused:
            _ssd_settings(*options, state_dir)
        assert refused.value.reason == "SSD_OPTIONS_INCOMPLETE"
    with pytest.raises(InvalidArgumentError) as refused:
        _ssd_settings(Path("d"), "1MiB", None, state_dir)
    assert refused.value.reason == "SSD_TOO_SMALL"


def test_i8_usage_of_both_tiers_is_reported() -> None:
    ssd = SsdUsage(
        reserved_bytes=0,
        limit_bytes=100,
        used_bytes=70,
        leaving_bytes=0,
        live_bytes=50,
        entries=5,
        segments=1,
        counters=SsdCounters(),
    )
    books = [TenantUsage(0, 9, 8, 8, 0, 0, 0, 2, TenantCounters(), below) for below in (ssd, None)]
    usage = NodeUsage(1, 9, 1, 1, {TenantId("a"): books[0], TenantId("b"): books[1]}, 100)
    a, b = encode_usage(usage)
    assert [(tier.tier, tier.used_bytes, tier.entries) for tier in a.tiers] == [
        (quotas_pb2.TIER_DRAM, 8, 2),
        (quotas_pb2.TIER_SSD, 70, 5),
    ]
    assert [tier.tier for tier in b.tiers] == [quotas_pb2.TIER_DRAM]
