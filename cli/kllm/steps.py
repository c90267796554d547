"""Progress of long steps: a live view on a terminal, lines elsewhere, JSON for programs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import sys
import time
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_HEARTBEAT_SECONDS = 10.0


class Steps:
    """Tells which steps run and for how long. An asynchronous context, so that waiting can be told too.

    This class keeps the times and says nothing.
    """

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._notes: dict[str, str] = {}
        self._heart: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to tell."""
        self._heart = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Tell nothing more."""
        if self._heart is not None:
            self._heart.cancel()
        self.close()

    def begin(self, name: str, text: str) -> None:
        """A step begins."""
        self._began[name] = time.monotonic()
        self._notes[name] = text
        self._show_begin(name, text)

    def note(self, name: str, text: str) -> None:
        """Something about a running step changed."""
        if name in self._began and self._notes[name] != text:
            self._notes[name] = text
            self._show_note(name, text)

    def done(self, name: str, text: str) -> None:
        """A step has ended well."""
        if name in self._began:
            self._show_done(name, text, time.monotonic() - self._began.pop(name))

    def say(self, text: str) -> None:
        """Something that is no step."""

    def tell(self, event: str, line: str, fields: dict[str, Any]) -> None:
        """Something that happened while serving: the line is for people, the fields are for programs.

        What nobody takes is left out: a reader that stands still must not make a service stand still.
        """
        del event, fields
        if _takes(sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader has gone, or the disk is full
                self.say(f"{time.strftime('%H:%M:%S')} {line}")

    def close(self) -> None:
        """Steps that still run are told as given up."""
        self._began.clear()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            waited = {name: time.monotonic() - began for name, began in self._began.items()}
            for name, seconds in waited.items():
                if seconds > _HEARTBEAT_SECONDS / 2:
                    self._show_waiting(name, self._notes[name], seconds)

    def _show_begin(self, name: str, text: str) -> None: ...

    def _show_note(self, name: str, text: str) -> None: ...

    def _show_done(self, name: str, text: str, seconds: float) -> None: ...

    def _show_waiting(self, name: str, text: str, seconds: float) -> None: ...


class PlainSteps(Steps):
    """Lines on standard error."""

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr, flush=True)

    def _show_begin(self, name: str, text: str) -> None:
        self.say(f"{name}: {text} …")

    def _show_note(self, name: str, text: str) -> None:
        self.say(f"{name}: {text}")

    def _show_done(self, name: str, text: str, seconds: float) -> None:
        self.say(f"{name}: {text} ({seconds:.1f} s)")

    def _show_waiting(self, name: str, text: str, seconds: float) -> None:
        self.say(f"{name}: {text} … {seconds:.0f} s")


class JsonSteps(Steps):
    """One JSON object per line on standard output."""

    def event(self, event: str, **fields: Any) -> None:
        """Print one object."""
        print(json.dumps({"event": event, **fields}), flush=True)

    def say(self, text: str) -> None:
        """Print a message."""
        self.event("message", message=text)

    def tell(self, event: str, line: str, fields: dict[str, Any]) -> None:
        """Print one object, with the time in seconds since 1970."""
        if _takes(sys.stdout):
            with contextlib.suppress(OSError, ValueError):  # the reader has gone, or the disk is full
                self.event(event, at=round(time.time(), 3), line=line, **fields)

    def _show_begin(self, name: str, text: str) -> None:
        self.event("step", name=name, state="running", message=text)

    def _show_note(self, name: str, text: str) -> None:
        self.event("step", name=name, state="running", message=text)

    def _show_done(self, name: str, text: str, seconds: float) -> None:
        self.event("step", name=name, state="done", message=text, seconds=round(seconds, 3))


class LiveSteps(Steps):
    """A spinner and a clock per running step on a terminal."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console  # noqa: PLC0415 - only a terminal pays for it
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        self._console = Console(stderr=True, highlight=False)
        self._tasks: dict[str, TaskID] = {}
        self._progress: Progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,  # rich would wrap lines that are meant to be copied
            redirect_stderr=False,
        )

    def say(self, text: str) -> None:
        """Print a line above the live view."""
        self._progress.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """End the live view."""
        super().close()
        self._progress.stop()

    def _show_begin(self, name: str, text: str) -> None:
        self._progress.start()
        self._tasks[name] = self._progress.add_task(f"{name}: {text}", total=None)

    def _show_note(self, name: str, text: str) -> None:
        self._progress.update(self._tasks[name], description=f"{name}: {text}")

    def _show_done(self, name: str, text: str, seconds: float) -> None:
        self._progress.remove_task(self._tasks.pop(name))
        self.say(f"✓ {name}: {text} ({seconds:.1f} s)")
        if not self._tasks:
            # Nothing moves now, and what others print must not be painted over.
            self._progress.stop()


def _takes(stream: TextIO) -> bool:
    """Whether a line can be written without waiting for a reader; a pipe says so with 4,096 bytes of room."""
    try:
        return bool(select.select([], [stream], [], 0)[1])
    except (OSError, ValueError):  # it has no file descriptor, so nobody reads it from outside
        return True


def terminal_steps() -> Steps:
    """Live on a terminal, lines elsewhere."""
    return LiveSteps() if sys.stderr.isatty() else PlainSteps()
