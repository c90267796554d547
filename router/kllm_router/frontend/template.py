"""The model's chat template, rendered as the engine renders it."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kllm_router.frontend.tokenizer import ModelFilesError, read_json

RESERVED_ARGUMENTS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
        "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize",
        "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
"""Names in `chat_template_kwargs` that would change how a template is applied rather than what it shows."""

_FAILURES = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip
"""What a template can raise with a client's messages in it."""

_MEDIA_WORDS = ("image", "audio", "video", "vision")


class TemplateError(ValueError):
    """The template refused the messages, or could not be rendered with them."""


class ChatTemplate:
    """A compiled template. Safe to use from several threads.

    Attributes:
        wants_parts: whether the template goes through content parts itself; otherwise it gets their text.
    """

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.wants_parts = _wants_parts(environment, source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFilesError(f"chat template, line {error.lineno}: {error.message}") from error
        self._named_tokens = dict(named_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of the prompt, with the opening of the assistant's turn.

        Args:
            messages: as `kllm_router.frontend.messages` normalises them.
            tools: in OpenAI's form; a template that fails with it is given the bare functions.
            arguments: further variables of the template.

        Raises:
            TemplateError: the template refused or failed.
        """
        variables = {"documents": None, **self._named_tokens, **(arguments or {})}
        try:
            return self._rendered(messages, tools, variables)
        except _FAILURES as first:
            if not tools:
                raise TemplateError(_said(first)) from first
        try:
            return self._rendered(messages, [tool.get("function", tool) for tool in tools], variables)
        except _FAILURES as second:
            raise TemplateError(_said(second)) from second

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        return self._template.render(messages=messages, tools=tools, add_generation_prompt=True, **variables)


def read_template(folder: Path) -> str | None:
    """The chat template of a model's folder, or None when it has none.

    A file chat_template.jinja goes before tokenizer_config.json. Of several named templates the engine takes the
    first, and so does this.

    Raises:
        ModelFilesError: a file cannot be read.
    """
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
        further = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        if further:
            return further[0].read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"{path}: {error}") from error
    return _first_template(read_json(folder / "tokenizer_config.json").get("chat_template"), folder)


def _first_template(configured: object, folder: Path) -> str | None:
    if configured is None or isinstance(configured, str):
        return configured
    entry = configured[0] if isinstance(configured, list) and configured else None
    template = entry.get("template") if isinstance(entry, dict) else None
    if not isinstance(template, str):
        raise ModelFilesError(f"{folder / 'tokenizer_config.json'}: chat_template is neither text nor named templates")
    return template


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


class _Generation(Extension):
    """The tag {% generation %}, which marks the assistant's turns for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    # Autoescape stays off: prompts are text, not HTML.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    # Local time without a zone, as the engine has it.
    return dt.datetime.now().strftime(form)  # noqa: DTZ005


def _wants_parts(environment: jinja2.Environment, source: str) -> bool:
    """Whether the template loops over a message's content (or is one of a multimodal model)."""
    if any(word in source for word in _MEDIA_WORDS):
        return True
    return any(
        _is_content(loop.iter, name)
        for loop in environment.parse(source).find_all(nodes.For)
        for name in ("message", "msg", "m")
    )


def _is_content(node: nodes.Node | None, variable: str) -> bool:
    """Whether a node is `variable.content`, perhaps sliced, filtered or tested."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if isinstance(node, nodes.Getitem):
        named = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    elif isinstance(node, nodes.Getattr):
        named = node.attr == "content"
    else:
        return False
    inner = node.node
    return named and isinstance(inner, nodes.Name) and inner.ctx == "load" and inner.name == variable
