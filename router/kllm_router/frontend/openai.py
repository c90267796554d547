"""OpenAI requests: validated, rendered, tokenised once, and made into what an engine gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from kllm_router.frontend import messages as chat
from kllm_router.frontend.body import parse_object
from kllm_router.frontend.messages import refuse
from kllm_router.frontend.template import RESERVED_ARGUMENTS, ChatTemplate, TemplateError, read_template
from kllm_router.frontend.tokenizer import ModelTokenizer, read_json
from kllm_router.frontend.validation import CHAT, COMPLETIONS, check_fields, check_token_ids
from kllm_router.interfaces import ApiError, EngineRequest
from kllm_router.limits import RequestLimits
from kllm_router.proxy.errors import no_such_model
from kllm_router.rids import new_rid

_Result = TypeVar("_Result")

_INLINE_CHARACTERS = 2048
"""Shorter prompts are tokenised where they are: handing them to a thread takes longer."""
_MAX_CHARACTERS_PER_TOKEN = 64
"""A text with more characters than this per token of the context is refused before it is tokenised."""
_MAX_CHARACTERS = 32 * 1024 * 1024
_COMPLETION_TOKENS = 16
"""Output limit of a completion that names none, as OpenAI and the engine have it."""
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})


class Model:
    """What the router needs to know of the model, from its folder: tokenizer, template and vocabulary.

    Attributes:
        name: that clients give in `model`.
        template: None when the model has none; then it takes no chat.
        vocabulary_size: ids at or above it do not exist.
        context_tokens: of the model's own configuration, if it says so.
        sampling_defaults: of generation_config.json.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.tokenizer = ModelTokenizer(folder)
        source = read_template(folder)
        self.template = None if source is None else ChatTemplate(source, self.tokenizer.named_tokens)
        config = read_json(folder / "config.json")
        config = config.get("text_config") or config
        size, context = config.get("vocab_size"), config.get("max_position_embeddings")
        self.vocabulary_size = size if isinstance(size, int) and size > 0 else self.tokenizer.vocabulary_size
        self.context_tokens = context if isinstance(context, int) and context > 0 else None
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        generation = read_json(folder / "generation_config.json")
        self.sampling_defaults = {name: generation[name] for name in names if generation.get(name) is not None}


class OpenAiPreparer:
    """Implements `kllm_router.interfaces.Preparer`.

    Attributes:
        listeners: told of every valid request, on the event loop.

    Args:
        model: the service's model.
        limits: asked on every request, because the fleet changes.
        created: seconds since the epoch, shown in the model list.
        threads: for templates and tokenizers.
    """

    def __init__(
        self,
        model: Model,
        *,
        limits: Callable[[], RequestLimits] = RequestLimits,
        created: int = 0,
        threads: int = 2,
    ) -> None:
        self._model = model
        self._limits = limits
        self._created = created
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self.listeners: list[Callable[[EngineRequest], None]] = []

    @classmethod
    def load(
        cls, folder: Path, name: str, *, limits: Callable[[], RequestLimits] = RequestLimits, created: int = 0
    ) -> OpenAiPreparer:
        """Read the model's files.

        Raises:
            ModelFilesError: one is missing or unreadable.
        """
        return cls(Model(folder, name), limits=limits, created=created)

    @property
    def model(self) -> Model:
        """The service's model."""
        return self._model

    def close(self) -> None:
        """Stop the threads; requests that are being prepared end first."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def models(self) -> list[dict[str, Any]]:
        """OpenAI model objects that this router serves."""
        shown: dict[str, Any] = {
            "id": self._model.name, "object": "model", "created": self._created, "owned_by": "kllm",
            "root": self._model.name, "parent": None,
        }  # fmt: skip
        if (context := self.context_tokens) is not None:
            shown["max_model_len"] = context
        return [shown]

    @property
    def context_tokens(self) -> int | None:
        """Longest prompt plus output: that of the instances, else that of the model."""
        told = self._limits().context_tokens
        return self._model.context_tokens if told is None else told

    async def prepare(self, path: str, body: bytes) -> EngineRequest:
        """Build the engine's request; long work runs in a thread.

        Raises:
            ApiError: what the client did wrong.
        """
        if path not in {CHAT, COMPLETIONS}:
            raise ApiError(404, f"unknown path {path}; there are {CHAT} and {COMPLETIONS}")
        build = self._chat if path == CHAT else self._completion
        request = await self.run(len(body), lambda: build(parse_object(body)))
        self.announce(request)
        return request

    def announce(self, request: EngineRequest) -> None:
        """Tell the listeners of a valid request."""
        for listener in self.listeners:
            listener(request)

    async def run(self, characters: int, work: Callable[[], _Result]) -> _Result:
        """Run work on a text of so many characters, in a thread if it is long."""
        if characters <= _INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def check_model(self, name: object) -> None:
        """Raise ApiError unless the router serves the model: 400 without a name, 404 for another one."""
        if name is None:
            raise refuse("model", "is required")
        if not isinstance(name, str):
            raise refuse("model", "must be text")
        if name != self._model.name:
            raise no_such_model(name, [self._model.name])

    def check_length(
        self, prompt_tokens: int, max_new_tokens: int | None, *, param: str, limit_param: str = "max_tokens"
    ) -> None:
        """Raise ApiError 400 unless prompt and output fit into the context and into some decode instance."""
        if prompt_tokens == 0:
            raise refuse(param, "has no tokens")
        context, room = self.context_tokens, self._limits().kv_tokens
        known = [tokens for tokens in (context, room) if tokens is not None]
        asked = max_new_tokens or 0
        if not known or (prompt_tokens < min(known) and prompt_tokens + asked <= min(known)):
            return
        limit, code = min(known), "context_length_exceeded"
        where = "the messages" if param == "messages" else "the prompt"
        message = (
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt_tokens + asked} "
            f"tokens ({prompt_tokens} in {where}, {asked} in the completion). Please reduce the length of {where} or "
            "completion."
        )
        raise ApiError(400, message, param=limit_param if asked >= limit else param, code=code)

    def check_characters(self, characters: int, *, param: str) -> None:
        """Raise ApiError 400 for a text that cannot fit, before it costs anything."""
        context = self.context_tokens
        most = _MAX_CHARACTERS if context is None else min(_MAX_CHARACTERS, context * _MAX_CHARACTERS_PER_TOKEN)
        if characters > most:
            message = f"{param}: has {characters} characters, at most {most} are allowed" + (
                "" if context is None else f"; this model's maximum context length is {context} tokens"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        arguments: dict[str, Any] | None = None,
        continue_final: bool = False,
    ) -> list[int]:
        """Token ids of normalised messages. May take long: see `run`.

        Raises:
            ApiError: 400: no template, or the template refused.
        """
        template = self._model.template
        if template is None:
            raise refuse("messages", f"the model {self._model.name} has no chat template; use {COMPLETIONS}")
        prefix = chat.take_final_assistant(messages, continue_final=continue_final)
        try:
            text = template.render(messages, tools=tools, arguments=arguments)
        except TemplateError as error:
            raise refuse("messages", f"the model's chat template refused them: {error}") from error
        self.check_characters(len(text), param="messages")
        ids = self._model.tokenizer.encode_rendered(text)
        return ids if not prefix else ids + self._model.tokenizer.encode_continuation(prefix)

    def normalise(self, messages: object) -> list[dict[str, Any]]:
        """Check messages of a client; see `normalise_messages`."""
        template = self._model.template
        return chat.normalise_messages(messages, wants_parts=template is not None and template.wants_parts)

    def _chat(self, body: dict[str, Any]) -> EngineRequest:
        self.check_model(body.get("model"))
        body = check_fields(CHAT, body, vocabulary_size=self._model.vocabulary_size)
        messages = self.normalise(body.get("messages"))
        self.check_characters(sum(_characters(message["content"]) for message in messages), param="messages")
        tools = chat.normalise_tools(body.get("tools"))
        own = [tool for message in messages for tool in message.get("tools", ())]
        shown = chat.shown_tools(tools, [*tools, *own], body.get("tool_choice"))
        ids = self.render(
            messages, tools=shown, arguments=_arguments(body), continue_final=body.get("continue_final_message", False)
        )
        limit_param = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        limit = body.get(limit_param)
        self.check_length(len(ids), limit, param="messages", limit_param=limit_param)
        return self._request(CHAT, body, ids, limit, {"input_ids": ids})

    def _completion(self, body: dict[str, Any]) -> EngineRequest:
        self.check_model(body.get("model"))
        body = check_fields(COMPLETIONS, body, vocabulary_size=self._model.vocabulary_size)
        ids = self._prompt(body.get("prompt"))
        limit = body.get("max_tokens", _COMPLETION_TOKENS)
        self.check_length(len(ids), limit, param="prompt")
        return self._request(COMPLETIONS, body, ids, limit, {"prompt": ids})

    def _prompt(self, prompt: object) -> list[int]:
        if prompt is None:
            raise refuse("prompt", "is required")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise refuse("prompt", f"has {len(prompt)} prompts; send one request for each", code="unsupported")
            prompt = prompt[0]
        if prompt in ("", []):
            raise refuse("prompt", "must not be empty")
        if isinstance(prompt, str):
            self.check_characters(len(prompt), param="prompt")
            return self._model.tokenizer.encode(prompt)
        if isinstance(prompt, list):
            return check_token_ids("prompt", prompt, self._model.vocabulary_size)
        raise refuse("prompt", "must be text or a list of token ids")

    def _request(
        self, path: str, body: dict[str, Any], ids: list[int], limit: int | None, prompt: dict[str, Any]
    ) -> EngineRequest:
        options = body.pop("stream_options", {})
        stream = body.pop("stream", False)
        return EngineRequest(
            rid=new_rid(),
            path=path,
            body={**body, **prompt},
            input_ids=ids,
            stream=stream,
            include_usage=bool(options.get("include_usage")),
            max_new_tokens=limit,
            model=self._model.name,
            salt=body.get("cache_salt", ""),
        )


def _characters(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text", "")) for part in content) if isinstance(content, list) else 0


def _arguments(body: dict[str, Any]) -> dict[str, Any]:
    """Variables for the template, from chat_template_kwargs and the reasoning fields, as the engine derives them."""
    given = dict(body.get("chat_template_kwargs") or {})
    for name in given:
        if name in RESERVED_ARGUMENTS:
            raise refuse(f"chat_template_kwargs.{name}", "is not allowed")
    effort, thinking = _reasoning(body)
    if thinking is not None:
        given.setdefault("thinking", thinking)
        given.setdefault("enable_thinking", thinking)
    if effort is not None:
        given.setdefault("reasoning_effort", effort)
    return given


def _reasoning(body: dict[str, Any]) -> tuple[str | float | None, bool | None]:
    """Effort, and whether the model shall think; None where the client says nothing."""
    effort, thinking = body.get("reasoning_effort"), None
    nested = body.get("reasoning")
    if isinstance(nested, dict):
        inner = nested.get("effort", nested.get("reasoning_effort"))
        effort = effort if inner is None else inner
        enabled = nested.get("enabled", nested.get("enable"))
        if enabled is True or (isinstance(enabled, str) and enabled.strip().lower() in {"1", "true", "yes", "y", "on"}):
            thinking = True
    if effort is None:
        return None, thinking
    tier = isinstance(effort, str) and effort in _EFFORTS
    number = isinstance(effort, int | float) and not isinstance(effort, bool) and 0 <= effort <= 0.99
    if not (tier or number):
        raise refuse("reasoning_effort", f"must be one of {', '.join(sorted(_EFFORTS))}, or a number from 0 to 0.99")
    return effort, effort != "none"
