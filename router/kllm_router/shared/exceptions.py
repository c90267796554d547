"""What can be wrong with what is shared."""

from __future__ import annotations


class AddressError(ValueError):
    """It is not known where Redis is; the message names what is wrong, and never the password."""


class ToldError(ValueError):
    """What another router seems to have told is not of the form that routers tell."""
