"""From the router's own request message to what an engine gets, with the same checks as over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kllm_core.contracts.router.v1 import router_pb2
from kllm_router.frontend.messages import refuse
from kllm_router.frontend.openai import OpenAiPreparer
from kllm_router.frontend.validation import COMPLETIONS, check_fields, check_token_ids
from kllm_router.interfaces import ApiError, EngineRequest
from kllm_router.rids import new_rid

GENERATE = "/generate"

_ENGINE_NAMES = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
"""Names that the engine's own API has for OpenAI's fields."""


async def prepare_generate(preparer: OpenAiPreparer, request: router_pb2.GenerateRequest) -> EngineRequest:
    """Build the engine's request.

    Raises:
        ApiError: 400 or 404; it names the field.
    """
    model = preparer.model
    if request.model:
        preparer.check_model(request.model)
    sampling = _sampling(preparer, request.sampling)
    ids = await preparer.run(request.ByteSize(), lambda: _prompt(preparer, request))
    limit = sampling["max_new_tokens"]
    preparer.check_length(len(ids), limit, param=request.WhichOneof("input") or "input")
    built = EngineRequest(
        rid=new_rid(),
        path=GENERATE,
        body={"input_ids": ids, "sampling_params": sampling},
        input_ids=ids,
        stream=True,
        max_new_tokens=limit,
        model=model.name,
    )
    preparer.announce(built)
    return built


def _prompt(preparer: OpenAiPreparer, request: router_pb2.GenerateRequest) -> list[int]:
    kind = request.WhichOneof("input")
    if kind == "prompt":
        _check_text("prompt", request.prompt)
        preparer.check_characters(len(request.prompt), param="prompt")
        return preparer.model.tokenizer.encode(request.prompt)
    if kind == "tokens":
        ids = list(request.tokens.ids)
        if not ids:
            raise refuse("tokens", "must not be empty")
        return check_token_ids("tokens", ids, preparer.model.vocabulary_size)
    if kind == "chat":
        given = [{"role": message.role, "content": message.content} for message in request.chat.messages]
        for i, message in enumerate(given):
            _check_text(f"messages[{i}].content", message["content"])
        preparer.check_characters(sum(len(message["content"]) for message in given), param="messages")
        return preparer.render(preparer.normalise(given))
    raise ApiError(400, "input: set prompt, tokens or chat", param="input")


def _check_text(param: str, text: str) -> None:
    if not text and param == "prompt":
        raise refuse(param, "must not be empty")
    if "\0" in text:
        raise refuse(param, "must not contain NUL characters")


def _sampling(preparer: OpenAiPreparer, sampling: router_pb2.Sampling) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for descriptor, value in sampling.ListFields():
        repeated = descriptor.name in {"stop", "stop_token_ids"}
        given[descriptor.name] = list(value) if repeated else value
    if "grammar" in given:
        given["ebnf"] = given.pop("grammar")
    checked = check_fields(COMPLETIONS, given, vocabulary_size=preparer.model.vocabulary_size)
    named: Mapping[str, Any] = {_ENGINE_NAMES.get(name, name): value for name, value in checked.items()}
    # An absent limit would mean the engine's default of 128; null is the rest of the context.
    return {"max_new_tokens": None, **preparer.model.sampling_defaults, **named}
