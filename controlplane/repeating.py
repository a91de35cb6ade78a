"""Work that every control plane does again and again, through every absence of the database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from controlplane.rpc import to_saltern_error


async def repeat(
    step: Callable[[], Awaitable[object]], interval_s: float, *, name: str, warn: Callable[[str], object]
) -> NoReturn:
    """Do ``step`` with ``interval_s`` seconds in between, until cancelled.

    Args:
        name: what an unexpected error is logged under.
        warn: is told the reason when a step fails; the next one tries again.
    """
    while True:
        try:
            await step()
        except Exception as error:
            warn(to_saltern_error(error, method=name).reason)
        await asyncio.sleep(interval_s)
