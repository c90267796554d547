"""Errors of the agent.

AgentError
├── SettingsError     a flag or a file is wrong: exit code 2
└── EngineError       the engine cannot serve: exit code 1
    ├── StartError    it did not become ready
    │   └── EndedError    it ended by itself while it started
    ├── RefusedError  it became ready, but its self-check says that it must not serve
    └── DeadError     it served and then exited or hung, or is not heard any more
"""

from __future__ import annotations


class AgentError(Exception):
    """Base of the agent's errors; the message is for people."""


class SettingsError(AgentError):
    """A flag or a file is wrong."""


class EngineError(AgentError):
    """The engine cannot serve."""


class StartError(EngineError):
    """The engine did not become ready."""


class EndedError(StartError):
    """The engine ended by itself while it started.

    Attributes:
        status: exit code, or minus a signal's number.
    """

    def __init__(self, message: str, *, status: int) -> None:
        self.status = status
        super().__init__(message)


class RefusedError(EngineError):
    """The engine's self-check says that it must not serve."""


class DeadError(EngineError):
    """The engine exited or hung, or its plugin is not heard any more."""
