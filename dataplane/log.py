"""Logs of a node: one JSON object a line, to stderr. Never a token, a key or a salt in one."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging() -> None:
    """Set up structlog for this process.

    Tracebacks are plain text: structlog's own structured form would show local variables, and those hold secrets.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
