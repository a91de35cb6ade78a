"""What SIEMs, spreadsheets and warehouses get: valid against the published schema, harmless, the same in any pieces."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace
from ocsf_json_schema import OcsfJsonSchemaEmbedded, get_ocsf_schema

from saltern.audit.chain import AuditRecord, ChainedRecord
from saltern.audit.formats import CSV_COLUMNS, TEXT_FORMATS
from saltern.audit.lines import encode_event
from saltern.audit.ocsf import SCHEMA_VERSION
from saltern.audit.parquet import ParquetFile
from saltern.errors import DataLossError, FailedPreconditionError
from tests.support.audit_chains import RECORD, START_US, chain_of, exported

DENIED = replace(RECORD, outcome="denied", reason="ROLE_REQUIRED", after=None, request_id="")
BY_ITSELF = replace(RECORD, actor="control-plane", actor_role="", peer="", resource="", method="Tick")
RECORDS = {
    "created": RECORD,
    "changed": replace(RECORD, method="saltern.admin.v1.QuotaService/UpdateQuota", before={"a": [1, None, True]}),
    "deleted": replace(RECORD, method="saltern.admin.v1.TenantService/DeleteTenant", before={"a": 1}, after=None),
    "denied": DENIED,
    "anonymous": replace(DENIED, actor="anonymous", actor_role="", resource=""),
    "by itself": BY_ITSELF,
    "from IPv6": replace(RECORD, peer="[2001:db8::7]:50412"),
    "from a socket": replace(RECORD, peer="unix:/run/saltern/control"),
    "redeemed": replace(RECORD, method="saltern.auth.v1.AuthService/RedeemBootstrapToken", actor="bootstrap"),
}


def line_of(record: AuditRecord, chain: str = "acme") -> bytes:
    (event,) = chain_of(1, chain, record)
    return encode_event(exported(event, chain)) + b"\n"


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    """The published JSON schema of the class; ``additionalProperties`` is false throughout."""
    published = OcsfJsonSchemaEmbedded(get_ocsf_schema(version=SCHEMA_VERSION))
    name = published.lookup_class_name_from_uid(6003)
    return jsonschema.Draft202012Validator(published.get_class_schema(name, profiles=[]))


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("chain", ["acme", "platform"])
def test_ocsf_is_valid_against_the_published_schema(
    schema: jsonschema.Draft202012Validator, kind: str, chain: str
) -> None:
    event = json.loads(TEXT_FORMATS["ocsf"].encode(line_of(RECORDS[kind], chain)))

    assert [error.message for error in schema.iter_errors(event)] == []
    assert event["type_uid"] == 600300 + event["activity_id"]
    assert event["time"] == START_US // 1000


def test_ocsf_says_who_what_from_where_and_how_it_ended() -> None:
    event = json.loads(TEXT_FORMATS["ocsf"].encode(line_of(DENIED)))

    assert event["actor"]["user"]["groups"] == [{"name": "tenant-admin", "type": "role"}]
    assert event["src_endpoint"] == {"ip": "192.0.2.7", "port": 50412}
    assert (event["activity_name"], event["status"], event["status_code"]) == ("Create", "Failure", "ROLE_REQUIRED")
    assert event["api"]["service"]["name"] == "saltern.admin.v1.NamespaceService"
    assert event["metadata"]["tenant_uid"] == "acme" and event["metadata"]["uid"] == "tenants/acme/auditEvents/1"
    kept = json.loads(TEXT_FORMATS["ocsf"].encode(line_of(RECORD)))["resources"][0]["data"]
    assert kept == {"after": RECORD.after}


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_no_cell_of_a_csv_is_a_formula(start: str) -> None:
    nasty = f'{start}cmd|"/c calc"!A1,\nx'
    record = replace(RECORD, actor=nasty, resource=nasty, reason=nasty, after={"a": nasty})

    data = TEXT_FORMATS["csv"].header + TEXT_FORMATS["csv"].encode(line_of(record))

    rows = list(csv.DictReader(io.StringIO(data.decode(), newline="")))
    assert len(rows) == 1 and tuple(rows[0]) == CSV_COLUMNS
    assert rows[0]["actor"] == rows[0]["resource"] == rows[0]["reason"] == "'" + nasty
    assert json.loads(rows[0]["after"]) == {"a": nasty}
    assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in rows[0].values())


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_a_format_does_not_depend_on_how_the_lines_are_grouped(name: str) -> None:
    lines = [encode_event(exported(event)) + b"\n" for event in chain_of(5)]
    form = TEXT_FORMATS[name]

    assert form.encode(b"".join(lines)) == b"".join(map(form.encode, lines))
    assert form.encode(b"") == b""


@pytest.mark.parametrize("name", ["csv", "ocsf"])
def test_what_is_no_event_is_refused(name: str) -> None:
    with pytest.raises(DataLossError):
        TEXT_FORMATS[name].encode(b'{"actor":1}\n')


def test_parquet_holds_every_event_with_its_types(tmp_path: Path) -> None:
    import pyarrow.parquet

    events: list[ChainedRecord] = list(chain_of(3))
    with ParquetFile(tmp_path / "a.parquet") as file:
        for event in events:
            file.write(encode_event(exported(event)) + b"\n")

    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert table.column_names == list(CSV_COLUMNS)
    assert table["sequence"].to_pylist() == [1, 2, 3]
    assert str(table.schema.field("event_time").type) == "timestamp[us, tz=UTC]"
    assert json.loads(table["after"][0].as_py()) == RECORD.after and table["before"][0].as_py() is None


def test_without_pyarrow_the_error_says_what_to_install(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(FailedPreconditionError) as caught:
        ParquetFile(tmp_path / "a.parquet")

    assert caught.value.reason == "EXTRA_NOT_INSTALLED" and "saltern[parquet]" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
