"""What ``docs/reference/`` holds, and what writes each page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.docs.reference import environment, errors, services

PAGES: dict[str, Callable[[Path], str]] = {
    "environment.md": environment.page,
    "errors.md": errors.page,
    "services.md": services.page,
}
