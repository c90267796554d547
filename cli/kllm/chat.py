"""One question to a router's OpenAI API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import httpx2

_CONNECT_SECONDS = 5.0
_MODELS_SECONDS = 10.0
"""To list models, which a router that lives does at once."""
_SILENCE_SECONDS = 70.0
"""Without a byte of a stream. A router gives up a first token, or a next part, after 60 s, and can say why."""
_WHOLE_SECONDS = 600.0
"""For an answer that is no stream: its first byte comes when all of it is there."""


@dataclass(frozen=True)
class Limits:
    """Seconds without a byte after which a router counts as not answering."""

    models: float = _MODELS_SECONDS
    stream: float = _SILENCE_SECONDS
    whole: float = _WHOLE_SECONDS


class ChatError(Exception):
    """The router gave no answer; the text says why."""


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        model: None takes the first that the router lists.
        temperature: None is the model's default.
    """

    text: str
    model: str | None = None
    max_tokens: int = 256
    temperature: float | None = None
    system: str | None = None

    def body(self, model: str, *, stream: bool) -> dict[str, Any]:
        """As the API wants it."""
        messages = [{"role": "user", "content": self.text}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": self.max_tokens, "stream": stream}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if stream:
            body["stream_options"] = {"include_usage": True}
        return body


@dataclass
class Measured:
    """What the client saw of one stream.

    Attributes:
        headers: of the response, names in lower case.
        first_at: seconds from the request to the first piece of text; None without one.
        last_at: the same for the last piece.
        tokens: of the answer, as the server counted them, else pieces of text.
    """

    headers: dict[str, str] = field(default_factory=dict)
    first_at: float | None = None
    last_at: float = 0.0
    tokens: int = 0

    @property
    def tpot_seconds(self) -> float:
        """Mean time per token after the first; 0 with fewer than two."""
        if self.first_at is None or self.tokens < 2:
            return 0.0
        return (self.last_at - self.first_at) / (self.tokens - 1)


class Router:
    """A router's OpenAI API. A context.

    Args:
        url: its base address, with or without http:// and /v1.
        api_key: if it asks for one.
        limits: for how long it is waited for.
    """

    def __init__(self, url: str, *, api_key: str | None = None, limits: Limits | None = None) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        base = base if "://" in base else f"http://{base}"
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        # Proxies of the environment are for the outside world; a router is addressed directly.
        self._client = httpx2.Client(base_url=base, headers=headers, trust_env=False)
        self._limits = limits or Limits()

    def __enter__(self) -> Self:
        """Open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close its connections."""
        self._client.close()

    def first_model(self) -> str:
        """The first model that it lists.

        Raises:
            ChatError: it lists none, or does not answer.
        """
        try:
            response = self._client.get("/v1/models", timeout=_timeout(self._limits.models))
            _check(response)
            models = response.json()["data"]
            return str(models[0]["id"])
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ChatError(_unreachable(self._client, error)) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ChatError(f"{self._client.base_url} lists no models") from error

    def answer(self, question: Question) -> str:
        """The whole answer.

        Raises:
            ChatError: there was none.
        """
        body = question.body(question.model or self.first_model(), stream=False)
        try:
            response = self._client.post("/v1/chat/completions", json=body, timeout=_timeout(self._limits.whole))
            _check(response)
            return str(response.json()["choices"][0]["message"]["content"] or "")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ChatError(_unreachable(self._client, error)) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ChatError(f"{self._client.base_url} answered something else than a chat completion") from error

    def stream(self, question: Question, measured: Measured) -> Iterator[str]:
        """The answer in pieces as they come.

        Raises:
            ChatError: there was none, or it broke off.
        """
        body = question.body(question.model or self.first_model(), stream=True)
        began = time.monotonic()
        try:
            with self._client.stream(
                "POST",
                "/v1/chat/completions",
                json=body,
                headers={"x-kllm-timing": "1"},
                timeout=_timeout(self._limits.stream),
            ) as response:
                if response.is_error:
                    response.read()
                _check(response)
                measured.headers.update(response.headers)
                for chunk in _chunks(response):
                    text = _text(chunk, measured)
                    if text:
                        measured.last_at = time.monotonic() - began
                        measured.first_at = measured.last_at if measured.first_at is None else measured.first_at
                        yield text
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ChatError(_unreachable(self._client, error)) from error


def _chunks(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    ended = False
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            ended = True
            continue
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise ChatError(f"the stream holds something else than JSON: {data[:200]}") from error
        if isinstance(chunk, dict) and "error" in chunk:
            raise ChatError(_message(chunk) or "the stream ended with an error")
        yield chunk
    if not ended:
        raise ChatError("the stream broke off before its end")


def _text(chunk: dict[str, Any], measured: Measured) -> str:
    """Text of one chunk. Counts its tokens; the server's own count, which comes last, replaces that."""
    if isinstance(chunk.get("usage"), dict):
        measured.tokens = int(chunk["usage"].get("completion_tokens") or measured.tokens)
    choices = chunk.get("choices") or [{}]
    text = str((choices[0].get("delta") or {}).get("content") or "")
    measured.tokens += 1 if text else 0
    return text


def _check(response: httpx2.Response) -> None:
    if response.is_success:
        return
    try:
        message = _message(response.json())
    except ValueError:
        message = None
    raise ChatError(message or f"the router answered with status {response.status_code}")


def _message(document: Any) -> str | None:
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None


def _timeout(seconds: float) -> httpx2.Timeout:
    return httpx2.Timeout(seconds, connect=_CONNECT_SECONDS)


def _unreachable(client: httpx2.Client, error: Exception) -> str:
    if isinstance(error, httpx2.ConnectTimeout):
        return f"{client.base_url} does not answer: no connection within {_CONNECT_SECONDS:g} s"
    if isinstance(error, httpx2.ReadTimeout):
        seconds = error.request.extensions["timeout"]["read"]
        return f"{client.base_url} took the question and sent nothing for {seconds:g} s; see: kllm status"
    if isinstance(error, httpx2.RemoteProtocolError):
        return f"{client.base_url} broke off its answer: {error}"
    return f"{client.base_url} does not answer: {error or type(error).__name__}"
