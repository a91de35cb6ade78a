"""The harness itself, in one short round; figures are not judged here, a tenant's rights are."""

from __future__ import annotations

from tests.noisy.__main__ import HIT_RATE_RATIO_MIN, table
from tests.noisy.run import ALONE, FLOODED, measure
from tests.noisy.setting import choose_pins


def test_i5_a_flood_takes_nothing_from_a_tenant_within_its_reservation() -> None:
    report = measure(rounds=1, round_s=1.0, transport="tcp", pins=choose_pins(), flat_out=False, say=lambda _: None)
    alone, flooded = report.kinds[ALONE], report.kinds[FLOODED]
    assert alone.turns > 0 and flooded.turns > 0 and report.flood_stored > 0
    assert report.hit_rate_ratio >= HIT_RATE_RATIO_MIN
    assert alone.wrong == flooded.wrong == 0
    assert "beside the flood" in table(report)
