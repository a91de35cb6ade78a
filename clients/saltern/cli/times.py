"""Times on the command line."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import click


class TimeParameter(click.ParamType[datetime]):
    """A time: RFC 3339, or a date alone; without an offset it is UTC."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        try:
            parsed = datetime.fromisoformat(value)
            return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"{value[:64]!r} is no time; write 2026-11-29 or 2026-11-29T18:00:00Z", param, ctx)


TIME: Final = TimeParameter()
