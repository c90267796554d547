"""What a router may ask of an engine so that a stream can go on elsewhere: two fields of a request's body. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"

TOKEN_IDS_FIELD = "kllm_token_ids"  # noqa: S105
"""True: the stream tells token ids as SSE comments."""

RESUME_FIELD = "kllm_resume_output_ids"
"""Output ids that the client has been told already: go on after them."""

RESUMED_COUNT = "kllm_resumed"
"""Key of SGLang's `custom_params`: how many ids at the end of the prompt are output in truth."""


class ContinuationError(ValueError):
    """A field that cannot be served; the message names it and the way out."""


@dataclass(frozen=True)
class Wish:
    """What one request asks for.

    Attributes:
        token_ids: tell token ids in the stream.
        resume: output ids that were told already.
        tools: the answer may call tools, so that a parser holds parts of its text back.
    """

    token_ids: bool
    resume: list[int]
    tools: bool


def has_wish(path: str, body: Any) -> bool:
    """Whether a request's body asks for anything."""
    known = isinstance(body, dict) and path in {CHAT, COMPLETIONS, GENERATE}
    return known and (TOKEN_IDS_FIELD in body or RESUME_FIELD in body)


def read_wish(path: str, body: Any, *, vocabulary: int, context: int) -> Wish | None:
    """The wish in a request's body; None without one.

    Args:
        path: of the request.
        body: parsed JSON.
        vocabulary: ids at or above it do not exist.
        context: most tokens of prompt and output together.

    Raises:
        ContinuationError: a field is wrong, or the request cannot be resumed.
    """
    if not has_wish(path, body):
        return None
    token_ids = body.get(TOKEN_IDS_FIELD, False)
    if not isinstance(token_ids, bool):
        raise ContinuationError(f"{TOKEN_IDS_FIELD} must be true or false")
    resume = body.get(RESUME_FIELD) or []
    if not isinstance(resume, list):
        raise ContinuationError(f"{RESUME_FIELD} must be a list of token ids")
    if resume:
        _check_ids(resume, vocabulary)
        _check_request(path, body, len(resume), context)
    return Wish(token_ids, resume, path == CHAT and _calls_tools(body))


def output_limit(body: Mapping[str, Any]) -> int | None:
    """Most output tokens that the body names, on whichever path."""
    given = _sampling(body).get("max_new_tokens") or body.get("max_completion_tokens") or body.get("max_tokens")
    return given if isinstance(given, int) else None


def _check_ids(ids: list[Any], vocabulary: int) -> None:
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ContinuationError(
                f"{RESUME_FIELD}[{position}] must be a token id from 0 to {vocabulary - 1}, got {token!r}"
            )


def _check_request(path: str, body: Mapping[str, Any], count: int, context: int) -> None:
    prompt = body.get("prompt" if path == COMPLETIONS else "input_ids")
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], int):
        raise ContinuationError(f"{RESUME_FIELD} needs the prompt as one list of token ids")
    sampling = _sampling(body)
    if (sampling.get("n") or body.get("n") or 1) != 1 or (sampling.get("beam_width") or 1) != 1:
        raise ContinuationError(f"{RESUME_FIELD} goes with one answer only: set n to 1")
    if path == GENERATE and body.get("return_logprob"):
        raise ContinuationError(f"{RESUME_FIELD} cannot tell earlier log-probabilities again: leave return_logprob out")
    limit = output_limit(body)
    if limit is not None and count > limit:
        raise ContinuationError(f"{RESUME_FIELD} has {count} ids, at most {limit} output tokens were asked for")
    if len(prompt) + count >= context:
        raise ContinuationError(
            f"{RESUME_FIELD} has {count} ids after a prompt of {len(prompt)}, the context ends at {context}"
        )


def _calls_tools(body: Mapping[str, Any]) -> bool:
    if body.get("tool_choice") == "none":
        return False
    messages = body.get("messages")
    own = (message.get("tools") for message in messages if isinstance(message, dict)) if messages else ()
    return bool(body.get("tools")) or any(own)


def _sampling(body: Mapping[str, Any]) -> Mapping[str, Any]:
    given = body.get("sampling_params")
    return given if isinstance(given, dict) else {}
