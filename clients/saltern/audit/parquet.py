"""Audit events as an Apache Parquet file, for warehouses; needs the extra ``parquet`` (pyarrow)."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from saltern.audit.formats import json_text
from saltern.audit.lines import decode_event
from saltern.errors import FailedPreconditionError

_ROW_GROUP_EVENTS: Final = 50_000


class ParquetFile:
    """Writes one Parquet file; it is a file only once the block has ended well.

    Text columns are as in the JSON Lines form, ``before`` and ``after`` as JSON text, ``event_time`` in microseconds of
    UTC.
    """

    def __init__(self, path: Path) -> None:
        """Begin a file at ``path``.

        Raises:
            FailedPreconditionError: reason EXTRA_NOT_INSTALLED: pyarrow is not there.
        """
        arrow, parquet = _import_pyarrow()
        self._arrow = arrow
        text, integer = arrow.string(), arrow.int64()
        self._schema = arrow.schema(
            [
                ("sequence", integer),
                ("event_time", arrow.timestamp("us", tz="UTC")),
                ("chain", text),
                ("actor", text),
                ("actor_role", text),
                ("peer", text),
                ("method", text),
                ("resource", text),
                ("outcome", text),
                ("reason", text),
                ("request_id", text),
                ("policy_version", integer),
                ("before", text),
                ("after", text),
                ("hash_format", integer),
                ("hash", text),
                ("previous_hash", text),
            ]
        )
        self._writer = parquet.ParquetWriter(str(path), self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def write(self, lines: bytes) -> None:
        """Add whole events, given as JSON Lines; raises DataLossError for a line that is none."""
        for line in lines.splitlines():
            event = decode_event(line)
            row = {name: getattr(event, name) for name in self._schema.names}
            row["before"] = json_text(event.before) or None
            row["after"] = json_text(event.after) or None
            self._rows.append(row)
        if len(self._rows) >= _ROW_GROUP_EVENTS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
            self._rows = []


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise FailedPreconditionError(
            "exports as Parquet need pyarrow, which is not installed here",
            reason="EXTRA_NOT_INSTALLED",
            hint="pip install 'saltern[parquet]', or choose another --format",
        ) from None
    return pyarrow, pyarrow.parquet
