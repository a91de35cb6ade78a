"""Columns, prices and digests of usage records: exact, stable, and checked against figures worked out by hand."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from decimal import Decimal
from pathlib import Path

import pytest

from saltern.admin.v1 import usage_pb2
from saltern.billing.columns import COLUMNS, csv_head, csv_line, to_row
from saltern.billing.digest import RecordsDigest
from saltern.billing.prices import COST_COLUMNS, Prices, read_prices
from saltern.errors import InvalidArgumentError, NotFoundError

GIB_HOUR = 2**30 * 3600


def a_record(**fields: object) -> usage_pb2.UsageRecord:
    record = usage_pb2.UsageRecord(
        tenant="tenants/acme", tenant_uid="u", dram_byte_seconds="0", ssd_byte_seconds="0", **fields
    )  # type: ignore[arg-type]
    record.start_time.FromJsonString("2026-11-29T18:00:00Z")
    record.end_time.FromJsonString("2026-11-29T19:00:00Z")
    return record


def test_a_row_is_every_number_as_it_is() -> None:
    record = a_record(hits=3, misses=1, tokens_saved=48, puts_refused_by_reason={"QUOTA_EXCEEDED": 2, "NODE_FULL": 1})
    record.dram_byte_seconds = str(2**70)
    (row,) = csv.DictReader(io.StringIO(csv_head() + csv_line(to_row(record))))
    assert tuple(row) == COLUMNS
    assert row["tenant"] == "acme" and row["state"] == "closed" and row["start"] == "2026-11-29T18:00:00Z"
    assert row["dram_byte_seconds"] == "1180591620717411303424" and row["tokens_saved"] == "48"
    assert row["puts_refused_by_reason"] == '{"NODE_FULL":1,"QUOTA_EXCEEDED":2}'


def test_the_columns_are_those_that_bills_were_made_of() -> None:
    """A released column neither moves nor goes: new ones come last."""
    assert COLUMNS == (
        "tenant", "tenant_uid", "namespace", "start", "end", "state", "dram_byte_seconds", "ssd_byte_seconds", "hits",
        "misses", "tokens_saved", "read_bytes", "stored_bytes", "puts_stored", "puts_refused", "evictions",
        "evicted_bytes", "ssd_read_bytes", "ssd_written_bytes", "gap_seconds", "late_seconds",
        "puts_refused_by_reason", "evictions_by_cause",
    )  # fmt: skip


def test_costs_are_exact_decimals() -> None:
    prices = Prices("EUR", Decimal("0.004"), Decimal("0.0001"), Decimal("0.01"), Decimal("0.15"))
    record = a_record(read_bytes=2**30, stored_bytes=2**29, tokens_saved=2_000_000)
    record.dram_byte_seconds, record.ssd_byte_seconds = str(10 * GIB_HOUR), str(GIB_HOUR // 2)
    assert prices.columns(record) == dict(
        zip(
            COST_COLUMNS,
            ("EUR", "0.040000000", "0.000050000", "0.015000000", "0.055050000", "0.300000000"),
            strict=True,
        )
    )


def test_what_has_no_price_costs_nothing_and_says_so() -> None:
    record = a_record(read_bytes=2**40)
    record.dram_byte_seconds = str(GIB_HOUR)
    assert list(Prices("USD", Decimal(2)).columns(record).values()) == ["USD", "2.000000000", "", "", "2.000000000", ""]
    assert list(Prices("USD").columns(record).values()) == ["USD", "", "", "", "", ""]


def test_a_price_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"currency": "EUR", "dram_per_gib_hour": "0.004"}))
    assert read_prices(path) == Prices("EUR", dram_per_gib_hour=Decimal("0.004"))
    with pytest.raises(NotFoundError):
        read_prices(tmp_path / "none.json")


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", '"EUR"', "{}", '{"currency": "euro"}', '{"currency": "EUR", "dram": "1"}',
        '{"currency": "EUR", "dram_per_gib_hour": 0.004}', '{"currency": "EUR", "dram_per_gib_hour": "-1"}',
        '{"currency": "EUR", "dram_per_gib_hour": "1e9"}', '{"currency": "EUR", "dram_per_gib_hour": "NaN"}',
    ],
)  # fmt: skip
def test_a_price_file_that_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prices.json"
    path.write_text(content)
    with pytest.raises(InvalidArgumentError) as caught:
        read_prices(path)
    assert caught.value.reason == "INVALID_PRICE_FILE" and caught.value.hint


def test_a_digest_is_that_of_the_lines_of_an_export() -> None:
    digest, records = RecordsDigest(), [a_record(hits=1), a_record(hits=2)]
    for record in records:
        digest.add(record)
    lines = "".join(csv_line(to_row(record)) for record in records)
    assert digest.hexdigest() == hashlib.sha256(lines.encode()).hexdigest() and digest.records == 2
