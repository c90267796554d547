"""Steady requests to a service, as its clients send them; each answer is checked."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

_PLAIN_TOKENS = (10, 500)
"""Range of ids without special ones; the tiny model has 512."""
_REQUEST_SECONDS = 120.0
_PROMPTS = 8
_PROMPT_TOKENS = 40
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Answer:
    """One request and what came of it.

    Attributes:
        prompt: its number.
        began: monotonic seconds.
        ended: monotonic seconds.
        text: that came.
        error: what was wrong; empty if nothing was.
    """

    prompt: int
    began: float
    ended: float
    text: str
    error: str = ""


@dataclass
class Traffic:
    """Some streams at a time, one after the other, as a context.

    Generation is greedy, so that a prompt has one right answer: the one that it got on entry, when all was quiet.

    Args:
        address: HOST:PORT of the service.
        model: its name.
        streams: how many at a time.
        tokens: of each answer.
        pause_seconds: between two requests of a stream.
    """

    address: str
    model: str
    streams: int = 3
    tokens: int = 24
    pause_seconds: float = 0.1
    answers: list[Answer] = field(default_factory=list)
    _right: dict[int, str] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _began: float = 0.0

    def __enter__(self) -> Self:
        for number in range(_PROMPTS):
            answer = self._ask(number)
            if answer.error:
                raise AssertionError(f"nothing is right before anything is changed: {answer}")
            self._right[number] = answer.text
        self._began = time.monotonic()
        for stream in range(self.streams):
            thread = threading.Thread(target=self._send, args=(stream,), name=f"stream {stream}")
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(_REQUEST_SECONDS + 10)

    @property
    def failed(self) -> list[Answer]:
        """Requests that did not get the right answer."""
        return [each for each in list(self.answers) if each.error]

    def since(self, moment: float) -> list[Answer]:
        """Requests that began after a moment of the monotonic clock and have ended."""
        return [each for each in list(self.answers) if each.began >= moment]

    def go_on(self, count: int, *, seconds: float = 60.0) -> None:
        """Wait until so many requests that begin from here on have ended."""
        moment = time.monotonic()
        while len(self.since(moment)) < count:
            if time.monotonic() - moment > seconds:
                raise AssertionError(f"{len(self.since(moment))} of {count} requests in {seconds:.0f} s")
            time.sleep(_LOOK_SECONDS)

    def summary(self) -> dict[str, Any]:
        """Figures for a report, all of requests since entry."""
        answers = list(self.answers)
        slowest = max(answers, key=lambda each: each.ended - each.began, default=None)
        return {
            "sent": len(answers),
            "failed": len(self.failed),
            "seconds": round(time.monotonic() - self._began, 1),
            "slowest_seconds": 0.0 if slowest is None else round(slowest.ended - slowest.began, 2),
            "slowest_began_seconds": 0.0 if slowest is None else round(slowest.began - self._began, 1),
        }

    def _send(self, stream: int) -> None:
        number = stream
        while not self._stop.is_set():
            self.answers.append(self._ask(number % _PROMPTS))
            number += self.streams
            self._stop.wait(self.pause_seconds)

    def _ask(self, number: int) -> Answer:
        began = time.monotonic()
        text, error = "", ""
        try:
            text = ask(self.address, model=self.model, number=number, tokens=self.tokens)
        except (OSError, ValueError, KeyError, http.client.HTTPException) as problem:
            error = f"{type(problem).__name__}: {problem}"
        right = self._right.get(number)
        if not error and right is not None and text != right:
            error = f"{text!r} instead of {right!r}"
        return Answer(number, began, time.monotonic(), text, error)


def ask(address: str, *, model: str, number: int, tokens: int) -> str:
    """The text of one answer, over a connection of its own: so each may reach another router.

    Args:
        address: HOST:PORT.
        model: its name.
        number: of the prompt; equal numbers have equal answers.
        tokens: of the answer.

    Raises:
        OSError: the connection broke or was silent for two minutes.
        http.client.HTTPException: the same in the midst of an answer.
        ValueError: the service refused it, or the stream ended early or in an error.
    """
    rng = random.Random(number)
    body = {
        "model": model,
        "prompt": [rng.randrange(*_PLAIN_TOKENS) for _ in range(_PROMPT_TOKENS)],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(address, timeout=_REQUEST_SECONDS)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise ValueError(f"status {response.status}: {response.read().decode(errors='replace')}")
        lines = (line.decode().removeprefix("data:").strip() for line in response if line.startswith(b"data:"))
        return _text(list(lines))
    finally:
        connection.close()


def _text(events: list[str]) -> str:
    if not events or events[-1] != "[DONE]":
        raise ValueError(f"the stream ended early, after {events[-1:]}")
    chunks = [json.loads(event) for event in events[:-1]]
    wrong = [chunk for chunk in chunks if "error" in chunk]
    if wrong:
        raise ValueError(f"an error in the stream: {wrong[0]}")
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
