"""Logs of a node: one JSON object a line, to stderr. Never a token, a key or a salt in one."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import EventDict, WrappedLogger


def configure_logging(node: str) -> None:
    """Set up structlog for this process; every line says which ``node`` it is of, whatever thread wrote it.

    Tracebacks are plain text: structlog's own structured form would show local variables, and those hold secrets.
    """

    def add_node(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {"node": node, **event}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add_node,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
