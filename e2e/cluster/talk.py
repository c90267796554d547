"""What the cluster tells a person who waits."""

from __future__ import annotations

import sys


def say(message: str) -> None:
    """Write one line of progress to the standard error."""
    sys.stderr.write(f"cluster: {message}\n")
    sys.stderr.flush()
