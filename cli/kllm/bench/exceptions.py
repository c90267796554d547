"""Why a benchmark does not begin."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot run; the text says why.

    OptionError: an option is wrong.
    """


class OptionError(BenchError):
    """An option is wrong.

    Args:
        option: its name, as it is typed.
        message: what is wrong, and the fix.
    """

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option
