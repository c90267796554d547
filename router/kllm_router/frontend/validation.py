"""Fields of OpenAI's bodies: what is checked, and what is refused and why. Others go to the engine as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from kllm_router.frontend.messages import refuse

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_MAX_STOP = 32
_MAX_STOP_CHARACTERS = 256
_MAX_GRAMMAR_CHARACTERS = 64 * 1024
"""Compiling a grammar takes seconds for each hundred thousand characters, and an engine compiles few at a time."""

_MAX_LOGIT_BIAS = 4096
_INT64 = 2**63

_ROUTING = "is set by the router; a client cannot choose instances"
_STATE = "is internal to the engine"
_CODE = "would run the client's code in the engine"

REFUSED: Mapping[str, str] = {
    # Hosts, ranks and ids.
    "bootstrap_host": _ROUTING, "bootstrap_port": _ROUTING, "bootstrap_room": _ROUTING, "bootstrap_pair_key": _ROUTING,
    "decode_tp_size": _ROUTING, "routed_dp_rank": _ROUTING, "data_parallel_rank": _ROUTING,
    "disagg_prefill_dp_rank": _ROUTING, "routing_key": _ROUTING, "http_worker_ipc": _ROUTING, "rid": _ROUTING,
    "request_id": _ROUTING, "conversation_id": _ROUTING, "priority": "is not offered to clients",
    # Code and what it is given.
    "custom_logit_processor": _CODE, "custom_params": _CODE,
    "stop_regex": "is not offered: a hard pattern would stop the engine's scheduler; use stop",
    # State, files and what shows a model's inside.
    "input_ids": "is made by the router from messages or prompt; /v1/completions takes token ids in prompt",
    "input_embeds": _STATE, "positional_embed_overrides": _STATE, "session_id": _STATE, "session_params": _STATE,
    "resume_output_ids": _STATE, "return_hidden_states": "is not offered: hidden states stay in the engine",
    "return_routed_experts": "is not offered: routing stays in the engine", "routed_experts_start_len": _STATE,
    "return_indexer_topk": _STATE, "lora_path": "adapters are chosen by model name", "lora_id": _STATE,
    "extra_key": "is not offered; use cache_salt", "custom_labels": _STATE, "background": _STATE,
    "return_bytes": _STATE, "no_logs": _STATE, "log_metrics": _STATE, "require_reasoning": _STATE,
    # Media.
    "audio": "this service takes and gives text only", "image_data": "this service takes and gives text only",
    "video_data": "this service takes and gives text only", "audio_data": "this service takes and gives text only",
    "images_config": "this service takes and gives text only", "video_config": "this service takes and gives text only",
    "use_audio_in_video": "this service takes and gives text only",
    # Replaced in OpenAI's API.
    "functions": "is not supported; use tools", "function_call": "is not supported; use tool_choice",
}  # fmt: skip
"""Fields that no client may set, and what it is told."""

_OWN_PREFIX = "kllm_"

Check = Callable[[Any], str | None]


@dataclass(frozen=True)
class _Number:
    """A number in a range; `whole` ones may be written as 10.0."""

    low: float
    high: float
    whole: bool = False
    above: bool = False

    def __call__(self, value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "must be a whole number" if self.whole else "must be a number"
        if not math.isfinite(value) or (self.whole and value != int(value)):
            return "must be a whole number" if self.whole else "must be a finite number"
        if value > self.high or value < self.low or (self.above and value == self.low):
            start = "above" if self.above else "at least"
            return f"must be {start} {self.low:g} and at most {self.high:g}"
        return None


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "must be text"


def _grammar(value: Any) -> str | None:
    if not isinstance(value, str):
        return "must be text"
    return f"has more than {_MAX_GRAMMAR_CHARACTERS} characters" if len(value) > _MAX_GRAMMAR_CHARACTERS else None


def _object(value: Any) -> str | None:
    return None if isinstance(value, dict) else "must be an object"


def _stop(value: Any) -> str | None:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return "must be text or a list of texts"
    if any(len(text) > _MAX_STOP_CHARACTERS for text in texts):
        return f"has a text of more than {_MAX_STOP_CHARACTERS} characters"
    return f"has {len(texts)} texts, at most {_MAX_STOP} are allowed" if len(texts) > _MAX_STOP else None


def _one(value: Any) -> str | None:
    return None if value == 1 and not isinstance(value, bool) else "must be 1: one choice per request is supported"


def _modalities(value: Any) -> str | None:
    return None if value == ["text"] else 'must be ["text"]: this service gives text only'


def _response_format(value: Any) -> str | None:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return 'must be an object with type "text", "json_object" or "json_schema"'
    if value["type"] not in {"text", "json_object", "json_schema", "structural_tag"}:
        return f'has the unknown type {value["type"]!r}; use "text", "json_object" or "json_schema"'
    if value["type"] == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else value.get("schema")
        if not isinstance(schema, dict):
            return 'needs json_schema: {"name": "...", "schema": {...}}'
        if isinstance(inner, dict) and not isinstance(inner.get("name"), str):
            return "needs json_schema.name"
    return _size(value)


def _size(value: Any) -> str | None:
    written = len(orjson.dumps(value))
    return f"has more than {_MAX_GRAMMAR_CHARACTERS} bytes of JSON" if written > _MAX_GRAMMAR_CHARACTERS else None


def _stream_options(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "must be an object"
    if not isinstance(value.get("include_usage") or False, bool):
        return "include_usage must be true or false"
    return "continuous_usage_stats is not supported" if value.get("continuous_usage_stats") else None


_COUNT = _Number(1, _INT64 - 1, whole=True)
_SHARED: Mapping[str, Check] = {
    "max_tokens": _COUNT, "temperature": _Number(0, 2), "top_p": _Number(0, 1, above=True),
    "frequency_penalty": _Number(-2, 2), "presence_penalty": _Number(-2, 2),
    "repetition_penalty": _Number(0, 2, above=True), "min_p": _Number(0, 1), "min_tokens": _Number(0, _INT64 - 1, True),
    "seed": _Number(-_INT64, _INT64 - 1, whole=True), "stop": _stop, "stream": _boolean,
    "stream_options": _stream_options, "n": _one, "best_of": _one, "user": _text, "ignore_eos": _boolean,
    "skip_special_tokens": _boolean, "no_stop_trim": _boolean, "regex": _grammar, "ebnf": _grammar,
    "response_format": _response_format, "cache_salt": _text,
}  # fmt: skip
_CHECKS: Mapping[str, Mapping[str, Check]] = {
    CHAT: {
        **_SHARED, "max_completion_tokens": _COUNT, "logprobs": _boolean, "top_logprobs": _Number(0, 20, whole=True),
        "parallel_tool_calls": _boolean, "chat_template_kwargs": _object, "continue_final_message": _boolean,
        "modalities": _modalities, "separate_reasoning": _boolean, "stream_reasoning": _boolean,
    },
    COMPLETIONS: {
        **_SHARED, "logprobs": _Number(0, 20, whole=True), "echo": _boolean, "suffix": _text, "json_schema": _grammar,
    },
}  # fmt: skip


def check_fields(path: str, body: dict[str, Any], *, vocabulary_size: int) -> dict[str, Any]:
    """Check all fields but model, messages, prompt and tools.

    Args:
        path: CHAT or COMPLETIONS.
        body: of the client.
        vocabulary_size: ids at or above it would read outside the model's tables.

    Returns:
        The body without fields that are null, which is what leaving them out means.

    Raises:
        ApiError: 400 that names the field.
    """
    cleaned = {name: value for name, value in body.items() if value is not None}
    for name in cleaned:
        if name.startswith(_OWN_PREFIX):
            raise refuse(name, "is between the router and its engines", code="unsupported_field")
    for name, reason in REFUSED.items():
        if name in cleaned and cleaned[name] is not False:
            raise refuse(name, reason, code="unsupported_field")
        cleaned.pop(name, None)
    checks = _CHECKS[path]
    for name, value in cleaned.items():
        check = checks.get(name)
        if check is not None and (problem := check(value)) is not None:
            raise refuse(name, problem)
        if isinstance(check, _Number) and check.whole:
            cleaned[name] = int(value)
    _check_top_k(cleaned.get("top_k"))
    _check_logit_bias(cleaned.get("logit_bias"), vocabulary_size)
    _check_stop_token_ids(cleaned.get("stop_token_ids"), vocabulary_size)
    _check_combinations(path, cleaned)
    return cleaned


def check_token_ids(param: str, ids: list[Any], vocabulary_size: int) -> list[int]:
    """Check a prompt that is given as token ids."""
    if not all(type(token) is int for token in ids):
        raise refuse(param, "token ids must be whole numbers")
    if min(ids) < 0 or max(ids) >= vocabulary_size:
        wrong = next(token for token in ids if not 0 <= token < vocabulary_size)
        raise refuse(param, f"token id {wrong} is outside the vocabulary, 0 to {vocabulary_size - 1}")
    return ids


def _check_top_k(value: object) -> None:
    if value is None or value == -1:
        return
    if (problem := _Number(1, 2**31 - 1, whole=True)(value)) is not None:
        raise refuse("top_k", f"{problem}, or -1")


def _check_logit_bias(value: object, vocabulary_size: int) -> None:
    if value is None:
        return
    if not isinstance(value, dict) or len(value) > _MAX_LOGIT_BIAS:
        raise refuse("logit_bias", f"must be an object with at most {_MAX_LOGIT_BIAS} token ids as names")
    in_range = _Number(-100, 100)
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 12 and int(token) < vocabulary_size):
            raise refuse("logit_bias", f"{token[:40]!r} is not a token id, 0 to {vocabulary_size - 1}")
        if (problem := in_range(bias)) is not None:
            raise refuse(f"logit_bias.{token}", problem)


def _check_stop_token_ids(value: object, vocabulary_size: int) -> None:
    if value is None:
        return
    if not isinstance(value, list) or len(value) > _MAX_LOGIT_BIAS:
        raise refuse("stop_token_ids", f"must be a list of at most {_MAX_LOGIT_BIAS} token ids")
    if value:
        check_token_ids("stop_token_ids", value, vocabulary_size)


def _check_combinations(path: str, body: Mapping[str, Any]) -> None:
    if "stream_options" in body and not body.get("stream"):
        raise refuse("stream_options", "is only allowed with stream: true")
    if path == CHAT and body.get("top_logprobs") and not body.get("logprobs"):
        raise refuse("top_logprobs", "needs logprobs: true")
    if path == COMPLETIONS and body.get("echo") and "logprobs" in body:
        raise refuse("logprobs", "of the prompt are not supported: leave out echo or logprobs")
    if body.get("suffix"):
        raise refuse("suffix", "is not supported")
    response_format = body.get("response_format") or {}
    constraints = [name for name in ("regex", "ebnf", "json_schema") if body.get(name)]
    if response_format.get("type", "text") != "text":
        constraints.append("response_format")
    if len(constraints) > 1:
        raise refuse(constraints[0], f"cannot be combined with {constraints[1]}")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and body.get("min_tokens", 0) > limit:
        raise refuse("min_tokens", f"is above the limit of {limit} output tokens")
