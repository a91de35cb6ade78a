"""What usage costs, by a price file of the operator's::

    {
      "currency": "EUR",
      "dram_per_gib_hour": "0.004",
      "ssd_per_gib_hour": "0.0001",
      "moved_per_gib": "0.01",
      "prefill_per_million_tokens": "0.15"
    }

Prices are decimal numbers in text, so that none is a binary fraction; one that is left out is not charged. *Moved* is
what left the nodes and what came to them. *Tokens saved* are worth what computing them again would have cost: the price
of a million tokens of prefill, which is the operator's own figure, and an assumption, because not every token that was
read would have been computed, and one read again is counted again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from pathlib import Path
from typing import Final

from saltern.admin.v1 import usage_pb2
from saltern.errors import InvalidArgumentError, NotFoundError

COST_COLUMNS: Final = ("currency", "dram_cost", "ssd_cost", "moved_cost", "cost", "tokens_saved_value")
#: Digits after the point of every amount. Amounts of single records are rounded, half to even, and sums are of those.
COST_DIGITS: Final = 9
_FILE_MAX_BYTES: Final = 64 * 1024
_GIB: Final = 2**30
_GIB_HOURS: Final = Decimal(_GIB * 3600)
_MILLION: Final = Decimal(1_000_000)
_QUANTUM: Final = Decimal(1).scaleb(-COST_DIGITS)
_PRECISION: Final = 60
_CURRENCY: Final = re.compile(r"[A-Z]{3}", re.ASCII)
_PRICE: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in ``currency``, an ISO 4217 code; None is not charged."""

    currency: str
    dram_per_gib_hour: Decimal | None = None
    ssd_per_gib_hour: Decimal | None = None
    moved_per_gib: Decimal | None = None
    prefill_per_million_tokens: Decimal | None = None

    def columns(self, record: usage_pb2.UsageRecord) -> dict[str, str]:
        """The values of ``COST_COLUMNS``, empty for what has no price. ``cost`` is the sum of the three before it."""
        moved_bytes = record.read_bytes + record.stored_bytes
        dram = _amount(self.dram_per_gib_hour, int(record.dram_byte_seconds or 0), _GIB_HOURS)
        ssd = _amount(self.ssd_per_gib_hour, int(record.ssd_byte_seconds or 0), _GIB_HOURS)
        moved = _amount(self.moved_per_gib, moved_bytes, Decimal(_GIB))
        saved = _amount(self.prefill_per_million_tokens, record.tokens_saved, _MILLION)
        charged = [amount for amount in (dram, ssd, moved) if amount is not None]
        cells = (dram, ssd, moved, sum(charged, Decimal(0)) if charged else None, saved)
        texts = ("" if cell is None else f"{cell:.{COST_DIGITS}f}" for cell in cells)
        return dict(zip(COST_COLUMNS, (self.currency, *texts), strict=True))


def read_prices(path: Path) -> Prices:
    """Read a price file.

    Raises:
        NotFoundError: there is none. InvalidArgumentError: INVALID_PRICE_FILE: it is not as the module says.
    """
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_FILE_MAX_BYTES))
    except FileNotFoundError:
        raise NotFoundError(
            f"there is no price file {str(path)!r}", reason="PRICE_FILE_NOT_FOUND", hint="see docs/metering.md"
        ) from None
    except (OSError, ValueError) as error:
        raise _invalid(path, getattr(error, "strerror", None) or "it is not JSON") from None
    names = {field.name for field in fields(Prices)}
    if not isinstance(content, dict) or not content.keys() <= names:
        unknown = sorted(map(str, content.keys() - names)) if isinstance(content, dict) else []
        raise _invalid(path, f"it names {unknown[0][:64]!r}" if unknown else "it is not a JSON object")
    currency = content.pop("currency", None)
    if not isinstance(currency, str) or _CURRENCY.fullmatch(currency) is None:
        raise _invalid(path, "its currency is not three capital letters")
    for name, price in content.items():
        if not isinstance(price, str) or _PRICE.fullmatch(price) is None:
            raise _invalid(path, f"{name} is not a decimal number in text")
    return Prices(currency, **{name: Decimal(price) for name, price in content.items()})


def _amount(price: Decimal | None, count: int, per: Decimal) -> Decimal | None:
    if price is None:
        return None
    with localcontext(prec=_PRECISION):
        return (price * count / per).quantize(_QUANTUM, ROUND_HALF_EVEN)


def _invalid(path: Path, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"cannot use the price file {str(path)!r}: {what}",
        reason="INVALID_PRICE_FILE",
        hint='write {"currency": "EUR", "dram_per_gib_hour": "0.004"}; docs/metering.md names all prices',
    )
