"""What goes wrong with the cluster."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """The cluster cannot be brought up, reached or taken down; the message says what to do."""
