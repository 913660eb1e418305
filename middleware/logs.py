"""Logs: structlog over the standard library's; JSON in production, readable in a terminal."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

_SHARED: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]

#: Dramatiq says again, with the exception's text, what `job.failed` says without.
_SAID_BETTER = ("Failed to process message", "Actor '%s' returned a value")

#: Libraries that would print what they were given.
_QUIET = ("httpx", "httpcore", "urllib3", "uvicorn.access", "mail.log", "asyncio")


def configure(log_format: str) -> None:
    """Give every handler there is (one on stderr if none) this form: json, text, or auto by the terminal."""
    text = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())
    render: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=False)]
        if text
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_SHARED,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
    )
    structlog.configure(
        # First of all: a line below the level costs nothing else.
        processors=[structlog.stdlib.filter_by_level, *_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    for handler in root.handlers:
        handler.setFormatter(formatter)
    logging.getLogger("dramatiq.worker.WorkerThread").addFilter(_not_said_better)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    # Each attempt to connect, with the address; whoever waited for it says once what came of it.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)


def _not_said_better(record: logging.LogRecord) -> bool:
    return not record.msg.startswith(_SAID_BETTER)
