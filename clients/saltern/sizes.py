"""Sizes as people write them: ``512MiB`` to bytes and back. Integer arithmetic only, so that nothing is rounded."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from saltern.errors import InvalidArgumentError

SIZE_MAX_BYTES: Final = 2**53  #: what Postgres, JSON and every client language hold exactly
_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS: Final[dict[str, int]] = {unit.lower(): 1024**power for power, unit in enumerate(_BINARY)} | {
    unit: 1000**power for power, unit in enumerate(("", "kb", "mb", "gb", "tb", "pb"))
}
_SHAPE: Final = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,6})?) ?([A-Za-z]{0,3})", re.ASCII)


def parse_size(text: str, *, what: str = "size") -> int:
    """Parse ``"512MiB"``, ``"1.5 GiB"``, ``"2GB"`` (decimal) or ``"4096"`` into bytes.

    Raises:
        InvalidArgumentError: reason INVALID_SIZE: another form, a fraction of a byte, or more than 2^53 bytes.
    """
    match = _SHAPE.fullmatch(text.strip()) if isinstance(text, str) else None
    factor = _FACTORS.get(match[2].lower()) if match else None
    size_bytes = Decimal(match[1]) * factor if match and factor else None
    if size_bytes is None or size_bytes != int(size_bytes) or size_bytes > SIZE_MAX_BYTES:
        raise InvalidArgumentError(
            f"{what} {str(text)[:64]!r} is not a whole number of bytes from 0 to {SIZE_MAX_BYTES}",
            reason="INVALID_SIZE",
            hint="write bytes (1048576) or a unit: KiB, MiB, GiB, TiB, or KB, MB, GB for powers of 1000",
        )
    return int(size_bytes)


def format_size(size_bytes: int) -> str:
    """Format bytes for people, in the largest binary unit that leaves a number of at least 1: ``1.5 GiB``."""
    value, unit = float(size_bytes), _BINARY[0]
    for unit in _BINARY:
        if abs(value) < 1024 or unit == _BINARY[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
