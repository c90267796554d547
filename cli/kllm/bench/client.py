"""A client of an OpenAI endpoint that measures its streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Self

import httpx2
import numpy as np

from kllm.bench.exceptions import BenchError, OptionError
from kllm.bench.plan import Planned
from kllm.bench.prompts import Calibration, words
from kllm.bench.row import Row, Status

Clock = Callable[[], float]

_PROBE_CHARACTERS = (80, 640)
_STAGES = ": kllm "
"""Begins the comment in a stream that tells its stages."""


@dataclass(frozen=True)
class Target:
    """What is measured.

    Attributes:
        url: base address without /v1.
        model: None takes the first that is listed.
        is_chat: chat completions, else completions.
        ignores_eos: ask the server not to end an answer early; a field of SGLang and vLLM.
        timeout: seconds for a whole request.
        tells_stages: have kLLM's router tell what each stage of a request took.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    is_chat: bool = False
    ignores_eos: bool = True
    timeout: float = 120.0
    tells_stages: bool = False

    @property
    def path(self) -> str:
        """Of the endpoint."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"


class Client:
    """Sends to a target. An asynchronous context.

    It opens as many connections as it needs: whoever sends decides how many are in flight. A pool of httpx2 looks at
    all of its connections for each request; with a thousand the next requests would be late, so each has its own pool.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.model = target.model or ""
        headers = {"content-type": "application/json"}
        if target.api_key is not None:
            headers["authorization"] = f"Bearer {target.api_key}"
        if target.tells_stages:
            headers["x-kllm-timing"] = "1"
        self._url = _url(target.url)
        self._headers = headers
        self._tls = httpx2.create_ssl_context(trust_env=False)
        self._free: list[httpx2.AsyncClient] = []
        self._all: list[httpx2.AsyncClient] = []

    async def __aenter__(self) -> Self:
        """Open."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close its connections."""
        for connection in self._all:
            await connection.aclose()

    async def find_model(self) -> str:
        """The model that is asked for; the first that is listed, if the target names none.

        Raises:
            BenchError: the server does not answer, or lists none.
        """
        if not self.model:
            document = await self._call("GET", "/v1/models", None)
            try:
                self.model = str(document["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise BenchError(f"{self.target.url} lists no models; name one with --model") from error
        return self.model

    async def calibrate(self, rng: np.random.Generator) -> Calibration:
        """Learn from two short prompts how the server counts tokens.

        Raises:
            BenchError: it does not answer.
        """
        counts: list[tuple[int, int]] = []
        for characters in _PROBE_CHARACTERS:
            content = self.body(words(characters, rng), output_tokens=1, stream=False)
            document = await self._call("POST", self.target.path, content)
            try:
                counts.append((characters, int(document["usage"]["prompt_tokens"])))
            except (KeyError, TypeError, ValueError):
                return Calibration.guess()
        return Calibration.of(counts[0], counts[1])

    def body(self, prompt: str, *, output_tokens: int, stream: bool = True) -> bytes:
        """A request as it is sent."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": stream,
        }
        if self.target.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.target.ignores_eos:
            body["ignore_eos"] = True
        if stream:
            body["stream_options"] = {"include_usage": True}
        return json.dumps(body).encode()

    async def ask(self, content: bytes, row: Row, clock: Clock) -> None:
        """Send one request and write what happens into its row; failures too, so this raises nothing."""
        row.sent = clock()
        try:
            async with (
                asyncio.timeout(self.target.timeout),
                self._connection() as connection,
                connection.stream("POST", self.target.path, content=content) as response,
            ):
                if response.is_success:
                    await self._read(response, row, clock)
                else:
                    await response.aread()
                    row.fail(f"http_{response.status_code}", _message(response))
        except TimeoutError:
            row.fail("timeout", f"no end within {self.target.timeout:g} s")
        except httpx2.ConnectError as error:
            row.fail("connect", str(error) or type(error).__name__)
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            row.fail("broken_stream", str(error) or type(error).__name__)
        row.ended = clock()

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx2.AsyncClient]:
        """The one that was used last, as it is the most likely to be still open; a new one when all are in use."""
        connection = self._free.pop() if self._free else self._connect()
        try:
            yield connection
        finally:
            self._free.append(connection)

    def _connect(self) -> httpx2.AsyncClient:
        connection = httpx2.AsyncClient(
            base_url=self._url,
            headers=self._headers,
            timeout=None,  # each request has one of its own, as a whole
            # Idle connections end before common servers end them, so that none is reused at that very moment.
            limits=httpx2.Limits(keepalive_expiry=2.0),
            verify=self._tls,
            trust_env=False,  # a proxy of the environment would be measured too
        )
        self._all.append(connection)
        return connection

    async def _read(self, response: httpx2.Response, row: Row, clock: Clock) -> None:
        pieces = 0
        has_ended = False
        async for data in _events(response, row):
            if data == "[DONE]":
                has_ended = True
                continue
            try:
                chunk = json.loads(data)
                if "error" in chunk:
                    row.fail("stream_error", _error_text(chunk) or data)
                    return
                if self._has_token(chunk):
                    row.hear(clock())
                    pieces += 1
                elif row.first is not None and _closes(chunk):
                    # The last tokens may have no text of their own, and are in the count of tokens all the same.
                    row.last = clock()
                _count(chunk, row)
            except (ValueError, KeyError, TypeError, AttributeError, IndexError):
                row.fail("bad_answer", f"no chunk of a stream: {data}")
                return
        if not has_ended:
            row.fail("broken_stream", "the stream ended without [DONE]")
        elif row.first is None:
            row.fail("no_text", "the answer had no text")
        else:
            row.status = Status.OK
            row.completion_tokens = pieces if row.completion_tokens is None else row.completion_tokens

    def _has_token(self, chunk: dict[str, Any]) -> bool:
        """Whether a chunk brings a token.

        Without a chat template every chunk but the closing one is a token, whose text may be empty: half of a
        character, or an end of text that the server was told to ignore. Chats begin with a chunk that has a role only.
        """
        if not chunk.get("choices"):
            return False
        choice = chunk["choices"][0]
        if not self.target.is_chat:
            return bool(choice.get("text")) or choice.get("finish_reason") is None
        delta = choice.get("delta") or {}
        return any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))

    async def _call(self, method: str, path: str, content: bytes | None) -> Any:
        url = self.target.url
        try:
            async with asyncio.timeout(self.target.timeout), self._connection() as connection:
                response = await connection.request(method, path, content=content)
            if response.is_success:
                return response.json()
        except TimeoutError as error:
            raise BenchError(f"{url}{path} does not answer within {self.target.timeout:g} s") from error
        except httpx2.HTTPError as error:
            raise BenchError(f"{url} does not answer: {error or type(error).__name__}") from error
        except ValueError as error:
            raise BenchError(f"{url}{path} answers something else than JSON") from error
        raise BenchError(f"{url}{path} answers with status {response.status_code}: {_message(response)}")


async def warm_up(client: Client, planned: Planned, prompt: str) -> None:
    """Send one request that is not counted.

    Raises:
        BenchError: it failed.
    """
    row = Row(planned.index, 0.0, planned.input_tokens, planned.output_tokens)
    await client.ask(client.body(prompt, output_tokens=planned.output_tokens), row, asyncio.get_running_loop().time)
    if row.status is not Status.OK:
        raise BenchError(f"a warm-up request failed: {row.error}: {row.message}")


def _url(text: str) -> httpx2.URL:
    try:
        return httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise OptionError("--url", f"{text!r} is no address: {error}; use http://HOST:PORT") from error


async def _events(response: httpx2.Response, row: Row) -> AsyncIterator[str]:
    """Data of a stream; stages that are told in between go into the row."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line[5:].strip()
        elif line.startswith(_STAGES):
            # One that a broken stream has cut is no JSON; that it broke is told anyway.
            with contextlib.suppress(ValueError):
                row.stages = _stages(line.removeprefix(_STAGES))


def _stages(text: str) -> dict[str, float]:
    """Seconds by stage; those that are not known are left out."""
    return {name: seconds for name, seconds in json.loads(text).items() if seconds is not None}


def _closes(chunk: dict[str, Any]) -> bool:
    return any(choice.get("finish_reason") for choice in chunk.get("choices") or ())


def _count(chunk: dict[str, Any], row: Row) -> None:
    usage = chunk.get("usage")
    if usage:
        row.prompt_tokens = int(usage["prompt_tokens"])
        row.completion_tokens = int(usage["completion_tokens"])


def _message(response: httpx2.Response) -> str:
    try:
        text = _error_text(response.json())
    except ValueError:
        text = None
    return text or response.text[:300] or response.reason_phrase


def _error_text(document: Any) -> str | None:
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None
