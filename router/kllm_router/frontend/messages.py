"""Messages and tools of a chat request, checked and brought into the form that the engine gives to templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from kllm_router.interfaces import ApiError

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "latest_reminder")
_TEXT_FIELDS = ("tool_call_id", "name", "phase", "reasoning_content")
_MEDIA_PARTS = frozenset(
    {
        "image_url",
        "image",
        "input_image",
        "audio_url",
        "input_audio",
        "audio",
        "video_url",
        "video",
        "file",
        "input_file",
    }
)
MAX_MESSAGES = 10_000


def refuse(param: str, message: str, *, code: str | None = None) -> ApiError:
    """400 that names the field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def normalise_messages(messages: object, *, wants_parts: bool) -> list[dict[str, Any]]:
    """Check `messages` and return what a template gets.

    Args:
        messages: of the client's body.
        wants_parts: see `ChatTemplate`.

    Raises:
        ApiError: 400 that names the message and the field.
    """
    if not isinstance(messages, list):
        raise refuse("messages", "must be a list of messages")
    if not messages:
        raise refuse("messages", "must not be empty")
    if len(messages) > MAX_MESSAGES:
        raise refuse("messages", f"has {len(messages)} messages, at most {MAX_MESSAGES} are allowed")
    return [_message(message, f"messages[{i}]", wants_parts=wants_parts) for i, message in enumerate(messages)]


def take_final_assistant(messages: list[dict[str, Any]], *, continue_final: bool) -> str | None:
    """Treat a conversation that ends with the assistant as the engine does.

    Its text is either taken off, to be continued, or becomes the user's, so that the assistant answers it.

    Returns:
        The text to continue, if any.
    """
    if not messages or messages[-1].get("role") != "assistant" or not isinstance(messages[-1].get("content"), str):
        return None
    text: str = messages[-1]["content"]
    if continue_final:
        messages.pop()
        return text
    messages[-1] = {"role": "user", "content": text}
    return None


def normalise_tools(tools: object, param: str = "tools") -> list[dict[str, Any]]:
    """Check `tools` and return them with all the fields that a template may see."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise refuse(param, "must be a list of tools")
    return [_tool(tool, f"{param}[{i}]") for i, tool in enumerate(tools)]


def shown_tools(
    tools: Sequence[dict[str, Any]], effective: Sequence[dict[str, Any]], choice: object
) -> list[dict[str, Any]] | None:
    """Tools that the template gets, by `tool_choice`.

    Args:
        tools: of the request.
        effective: those and the ones of system messages.
        choice: the client's tool_choice.

    Raises:
        ApiError: 400 when the choice does not fit the tools.
    """
    if isinstance(choice, dict):
        name = _chosen_name(choice)
        if name not in {tool["function"]["name"] for tool in effective}:
            raise refuse("tool_choice", f"names the tool {name!r}, which is not in tools")
        return [tool for tool in tools if tool["function"]["name"] == name] or None
    if choice not in (None, "none", "auto", "required"):
        raise refuse("tool_choice", 'must be "none", "auto", "required" or {"type": "function", "function": {"name"}}')
    if choice == "required" and not effective:
        raise refuse("tool_choice", 'is "required", but there are no tools')
    return list(tools) if tools and choice != "none" else None


def _chosen_name(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise refuse("tool_choice", 'must be {"type": "function", "function": {"name": "..."}}')
    return name


def _message(message: object, param: str, *, wants_parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise refuse(param, "must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise refuse(f"{param}.role", f"must be one of {', '.join(ROLES)}")
    # Only this role is case-sensitive for the engine.
    if role.lower() == "user" and role != "user":
        raise refuse(f"{param}.role", 'must be "user" in lower case')
    role = role.lower()
    content = _content(message.get("content"), f"{param}.content", role=role, wants_parts=wants_parts)
    if role == "user":
        if message.get("content") is None:
            raise refuse(f"{param}.content", "is required in a user message")
        return {"role": role, "content": content}
    shown: dict[str, Any] = {"role": role, "content": content, **_text_fields(message, param)}
    if message.get("tool_calls") is not None:
        shown["tool_calls"] = _tool_calls(message["tool_calls"], f"{param}.tool_calls", parse=role == "assistant")
    if message.get("tools") is not None:
        shown["tools"] = normalise_tools(message["tools"], f"{param}.tools")
    if wants_parts and isinstance(message.get("content"), list):
        # Templates may print whole messages, and the engine puts content that was parts to the end.
        shown["content"] = shown.pop("content")
    return shown


def _text_fields(message: Mapping[str, Any], param: str) -> dict[str, str]:
    fields = {name: message[name] for name in _TEXT_FIELDS if message.get(name) is not None}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise refuse(f"{param}.{name}", "must be text")
    return fields


def _content(content: object, param: str, *, role: str, wants_parts: bool) -> Any:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(param, "must be text or a list of content parts")
    parts = [shown for i, part in enumerate(content) if (shown := _part(part, f"{param}[{i}]", role=role)) is not None]
    if not wants_parts or (role == "tool" and all(part["type"] == "text" for part in parts)):
        return " ".join(part["text"] for part in parts if part["type"] == "text")
    return parts


def _part(part: object, param: str, *, role: str) -> dict[str, Any] | None:
    """A content part as templates see it; None for one that they never see."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise refuse(param, 'must be an object like {"type": "text", "text": "..."}')
    if kind in _MEDIA_PARTS:
        raise refuse(f"{param}.type", f"{kind!r} is not supported: this service takes text only", code="unsupported")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise refuse(f"{param}.text", "must be text")
        return {"type": "text", "text": part["text"]}
    if kind == "tool_reference" and isinstance(part.get("name"), str):
        return {"type": kind, "name": part["name"]}
    if kind in {"thinking", "reasoning"} and role == "assistant":
        return None
    raise refuse(f"{param}.type", f"{kind!r} is not a content part of {role} messages; use text")


def _tool_calls(calls: object, param: str, *, parse: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise refuse(param, "must be a list of tool calls")
    shown = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            raise refuse(f"{param}[{i}]", 'must be {"id", "type": "function", "function": {"name", "arguments"}}')
        arguments = function.get("arguments")
        if parse and isinstance(arguments, str):
            arguments = _arguments(arguments, f"{param}[{i}].function.arguments")
        shown.append(
            {
                "id": call.get("id"),
                "index": call.get("index"),
                "type": "function",
                "function": {"name": function.get("name"), "arguments": arguments},
            }
        )
    return shown


def _arguments(text: str, param: str) -> dict[str, Any]:
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise refuse(param, "must be a JSON object written as text") from error
    if not isinstance(parsed, dict):
        raise refuse(param, "must be a JSON object written as text")
    return parsed


def _tool(tool: object, param: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict):
        raise refuse(param, 'must be {"type": "function", "function": {"name", "description", "parameters"}}')
    kind = tool.get("type", "function")
    if not isinstance(kind, str):
        raise refuse(f"{param}.type", 'must be "function"')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise refuse(f"{param}.function.name", "must be text")
    if parameters is not None and not isinstance(parameters, dict):
        raise refuse(f"{param}.function.parameters", "must be a JSON Schema object")
    description, strict = function.get("description"), function.get("strict")
    if description is not None and not isinstance(description, str):
        raise refuse(f"{param}.function.description", "must be text")
    if strict is not None and not isinstance(strict, bool):
        raise refuse(f"{param}.function.strict", "must be true or false")
    shown = {"description": description, "name": name, "parameters": parameters, "strict": bool(strict)}
    deferred = tool.get("defer_loading")
    if (inner := function.get("defer_loading", deferred)) is not None:
        shown["defer_loading"] = inner
    return {"type": kind, "function": shown, "defer_loading": deferred}
