"""Logs of the command line: warnings, on standard error."""

from __future__ import annotations

import logging
import os
import sys

import structlog


def configure() -> None:
    """Send structured logs to standard error; what a person must know is printed apart from them."""
    # gRPC's own library writes to standard error, past all handlers, whenever an agent ends.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.add_log_level,
            structlog.dev.ConsoleRenderer(colors=False),
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
