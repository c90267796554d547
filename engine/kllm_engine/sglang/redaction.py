"""Keeps the fleet token out of SGLang's log, which prints all server arguments at start."""

from __future__ import annotations

import logging
import re

_SECRET = re.compile(r"((?:admin_)?api_key'?(?:: |=))'[^']*'")


class SecretFilter(logging.Filter):
    """Masks API keys in the messages of the logger that it is added to."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record through, without secrets."""
        message = record.getMessage()
        if "api_key" in message:
            record.msg, record.args = _SECRET.sub(r"\1'***'", message), ()
        return True


def install() -> None:
    """Guard the logger that prints the arguments."""
    logging.getLogger("sglang.srt.entrypoints.engine").addFilter(SecretFilter())
