"""Progress bars on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def bars() -> Progress:
    """Bars with a text beside them, on standard error, gone in the end. They change when they are refreshed.

    Their own refreshing thread would wait for the interpreter just when something is timed. Made before that begins,
    since the imports take longer than a request may be late.
    """
    from rich.console import Console  # noqa: PLC0415 - only a terminal pays for it
    from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415

    columns = BarColumn(bar_width=30), TextColumn("{task.description}", markup=False)
    return Progress(*columns, console=Console(stderr=True, highlight=False), transient=True, auto_refresh=False)
