"""What `kubectl kllm` cannot do.

PluginError
├── KubectlError        kubectl refused or failed
│   └── NotFoundError   there is no such object
└── RefusedError        what was asked for makes no sense as things are
"""

from __future__ import annotations


class PluginError(Exception):
    """A command cannot be carried out; the message says why, and what to do."""


class KubectlError(PluginError):
    """Kubectl refused or failed."""


class NotFoundError(KubectlError):
    """There is no such object."""


class RefusedError(PluginError):
    """What was asked for makes no sense as things are."""
