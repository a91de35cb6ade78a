"""Audit events as text for other programs: JSON Lines as the service sends them, CSV, OCSF.

A format turns whole lines into whole records one by one, so that what comes out does not depend on how the lines were
grouped on their way, or on where an export was interrupted.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from saltern.audit import ocsf
from saltern.audit.lines import ExportedEvent, decode_event
from saltern.spreadsheets import text_cell

CSV_COLUMNS: Final = (
    "sequence",
    "event_time",
    "chain",
    "actor",
    "actor_role",
    "peer",
    "method",
    "resource",
    "outcome",
    "reason",
    "request_id",
    "policy_version",
    "before",
    "after",
    "hash_format",
    "hash",
    "previous_hash",
)
_ENCODER: Final = msgspec.json.Encoder(order="deterministic")


class TextFormat(Protocol):
    """A form of text that events are exported in."""

    @property
    def header(self) -> bytes:
        """What stands before the first record."""
        ...

    def encode(self, lines: bytes) -> bytes:
        """The records of whole events, given as JSON Lines.

        Raises:
            DataLossError: a line is no event.
        """
        ...


class JsonLines:
    """As the service sends them: the form that verifies."""

    header: Final = b""

    def encode(self, lines: bytes) -> bytes:
        return lines


class Csv:
    """RFC 4180, UTF-8; objects as JSON; no cell that a spreadsheet would run."""

    header: Final = (",".join(CSV_COLUMNS) + "\r\n").encode()

    def encode(self, lines: bytes) -> bytes:
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerows(_csv_row(decode_event(line)) for line in lines.splitlines())
        return text.getvalue().encode("utf-8")


class OcsfLines:
    """Events of the class API Activity of OCSF, one JSON object a line; see :mod:`saltern.audit.ocsf`."""

    header: Final = b""

    def encode(self, lines: bytes) -> bytes:
        return _ENCODER.encode_lines([ocsf.to_api_activity(decode_event(line)) for line in lines.splitlines()])


TEXT_FORMATS: Final[Mapping[str, TextFormat]] = {"jsonl": JsonLines(), "csv": Csv(), "ocsf": OcsfLines()}


def json_text(value: Mapping[str, Any] | None) -> str:
    """An object as JSON text; nothing as nothing."""
    return "" if value is None else _ENCODER.encode(value).decode("utf-8")


def _csv_row(event: ExportedEvent) -> tuple[object, ...]:
    return (
        event.sequence,
        msgspec.to_builtins(event.event_time),
        text_cell(event.chain),
        text_cell(event.actor),
        text_cell(event.actor_role),
        text_cell(event.peer),
        text_cell(event.method),
        text_cell(event.resource),
        text_cell(event.outcome),
        text_cell(event.reason),
        text_cell(event.request_id),
        event.policy_version,
        json_text(event.before),
        json_text(event.after),
        event.hash_format,
        event.hash,
        event.previous_hash,
    )
