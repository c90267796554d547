"""Makes SGLang's scheduler (0.5.21) treat the end of a resumed request's prompt as output that it has sampled before.

Stop strings, grammars, penalties and the count of reasoning tokens look at earlier output; the rest needs none.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from kllm_engine.sglang.continuation import RESUME_FIELD, RESUMED_COUNT

_RESUMED_ATTRIBUTE = "kllm_resumed_ids"

_PENALTIES = {
    "BatchedFrequencyPenalizer": ("cumulated_frequency_penalties", "frequency_penalties", "scatter_add_"),
    "BatchedPresencePenalizer": ("cumulated_presence_penalties", "presence_penalties", "scatter_"),
    "BatchedRepetitionPenalizer": ("cumulated_repetition_penalties", "repetition_penalties", "scatter_"),
}
"""State, strength, and how a token enters the state; the fourth penaliser counts tokens, and gets a lower count."""


def process_grammar(original: Callable[[Any, Any], bool], manager: Any, request: Any) -> bool:
    """A request is valid and about to be queued; True if its grammar is still being compiled."""
    params = request.sampling_params.custom_params
    count = params.get(RESUMED_COUNT) if params else None
    if type(count) is int and 0 < count < len(request.origin_input_ids):
        resumed = request.origin_input_ids[-count:]
        setattr(request, _RESUMED_ATTRIBUTE, resumed)
        manager.scheduler.batch_result_processor._maybe_update_reasoning_tokens(request, list(resumed))
    waits = original(manager, request)
    if not waits:
        _prime_grammar(request)
    return waits


def ready_grammars(result: list[Any], manager: Any) -> None:  # noqa: ARG001
    """Grammars were compiled."""
    for request in result:
        _prime_grammar(request)


def tail_text(original: Callable[..., str], request: Any, new_tokens: int = 1) -> str:
    """Text in which a stop string may end with the newest tokens."""
    resumed: array[int] | None = getattr(request, _RESUMED_ATTRIBUTE, None)
    params, output = request.sampling_params, request.output_ids
    if resumed is None or not (params.stop_strs or params.stop_regex_strs):
        return original(request, new_tokens)
    length = max(params.stop_str_max_len, params.stop_regex_max_len) + 1 + max(new_tokens - 1, 0)
    if len(output) >= length:
        return original(request, new_tokens)
    return str(request.tokenizer.decode(resumed[-(length - len(output)) :] + output))


def stop_position(original: Callable[..., int], request: Any, new_tokens: int, **what: str) -> int:
    """Where in the output a stop string that was found ends."""
    resumed: array[int] | None = getattr(request, _RESUMED_ATTRIBUTE, None)
    if resumed is None:
        return original(request, new_tokens, **what)
    output = request.output_ids
    request.output_ids = resumed + output
    try:
        return original(request, new_tokens, **what) - len(resumed)
    finally:
        request.output_ids = output


def sampling_info(result: Any, _class: Any, batch: Any, *_: Any) -> None:
    """Penalties of a batch were laid out, without any output yet."""
    penalties = result.penalizer_orchestrator
    if penalties is None or not penalties.is_required:
        return
    for row, request in enumerate(batch.reqs):
        resumed = getattr(request, _RESUMED_ATTRIBUTE, None)
        if resumed is not None:
            for penalizer in penalties.penalizers.values():
                _penalise(penalizer, row, resumed)


def _penalise(penalizer: Any, row: int, ids: array[int]) -> None:
    names = _PENALTIES.get(type(penalizer).__name__)
    if names is None or not penalizer.is_prepared():
        return
    import torch  # noqa: PLC0415

    state, strength, scatter = getattr(penalizer, names[0]), getattr(penalizer, names[1]), names[2]
    tokens = torch.tensor(ids.tolist(), dtype=torch.int64, device=state.device)
    getattr(state[row], scatter)(0, tokens, strength[row].expand(len(ids)))


def _prime_grammar(request: Any) -> None:
    resumed = getattr(request, _RESUMED_ATTRIBUTE, None)
    grammar = request.grammar
    if resumed is None or grammar is None or request.finished() or request.to_finish:
        return
    try:
        for token in resumed:
            grammar.accept_token(token)
    except ValueError:
        request.set_finish_with_abort(f"{RESUME_FIELD} does not follow the request's grammar")
        return
    # A decode instance takes a grammar that has seen tokens for one that has seen the first of its own.
    grammar.current_token = None
