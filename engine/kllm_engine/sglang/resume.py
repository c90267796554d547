"""Tells token ids in streams and goes on with broken ones, in the HTTP process of an SGLang server (0.5.21).

Ids that are resumed are appended to the prompt, so that prefill, transfer and decode work as always. What the engine
then says of prompt and output is put right here, and the ids' text runs once more through SGLang's stream handler,
unheard, so that its parsers stand where they stood.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from kllm_engine.sglang.chunks import ChunkStream
from kllm_engine.sglang.continuation import (
    CHAT,
    GENERATE,
    RESUME_FIELD,
    RESUMED_COUNT,
    ContinuationError,
    Wish,
    has_wish,
    read_wish,
)
from kllm_engine.sglang.pieces import CONTEXT_TOKENS, Cleanness, Decode, Pieces, WholeTokens
from kllm_engine.sglang.steps import Content, ParsedSteps, PlainSteps, Steps, finish_of

_WISH, _CHUNKS = "kllm.wish", "kllm.chunks"
_WHOLE_TOKENS_ATTRIBUTE = "kllm_whole_tokens"
_DEFAULT_LIMIT = 128
_BATCH = 64


async def request_json(original: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
    """A request's body was parsed: take the wish out, which the request's own model does not know."""
    body = await original(request)
    # SGLang parses once and keeps the result.
    if _WISH not in request.scope:
        wish = _wish(request.scope["path"], body)
        request.scope[_WISH] = wish
        if wish is not None and body.get("stream"):
            request.scope[_CHUNKS] = ChunkStream()
    return body


def streaming_response(
    original: Callable[..., Awaitable[None]], response: Any, scope: Any, receive: Any, send: Any
) -> Awaitable[None]:
    """A streamed response begins."""
    chunks: ChunkStream | None = scope.get(_CHUNKS)
    return original(response, scope, receive, send if chunks is None else chunks.begin(send))


def generate_request(
    original: Callable[..., AsyncGenerator[Content, None]], manager: Any, obj: Any, request: Any = None
) -> AsyncGenerator[Content, None]:
    """A generation begins; requests without a wish go their way unwrapped."""
    scope = {} if request is None else request.scope
    wish: Wish | None = scope.get(_WISH)
    if wish is None:
        return original(manager, obj, request)
    continued = _Continued(manager, obj, wish, path=scope["path"], chunks=scope.get(_CHUNKS))

    def begin() -> AsyncGenerator[Content, None]:
        return original(manager, obj, request)

    return continued.run(begin) if continued.acts else begin()


def _wish(path: str, body: Any) -> Wish | None:
    if not has_wish(path, body):
        return None
    from fastapi import HTTPException  # noqa: PLC0415
    from sglang.srt.entrypoints.http_server import get_global_state  # noqa: PLC0415

    manager = get_global_state().tokenizer_manager
    try:
        return read_wish(path, body, vocabulary=manager.model_config.vocab_size, context=manager.context_len)
    except ContinuationError as error:
        raise HTTPException(400, str(error)) from error


class _Continued:
    """One request that tells its ids, goes on after earlier ones, or both.

    Args:
        manager: SGLang's TokenizerManager.
        obj: SGLang's GenerateReqInput; a resumed one is changed.
        wish: what is asked for.
        path: of the request.
        chunks: of the response; None if it is not streamed.
    """

    def __init__(self, manager: Any, obj: Any, wish: Wish, *, path: str, chunks: ChunkStream | None) -> None:
        self._manager = manager
        self._obj = obj
        self._resumed = wish.resume
        self._path = path
        self._chunks = chunks = chunks if obj.stream else None
        self._can_continue = manager.tokenizer is not None and not manager.incremental_streaming_output
        self._parsed = path == CHAT and (wish.tools or bool(manager.server_args.reasoning_parser))
        self._announces = wish.token_ids and chunks is not None and self._can_continue and _is_repeatable(obj, path)
        self._prompt: list[int] = obj.input_ids or []

    @property
    def acts(self) -> bool:
        """Whether anything is to be done, after all."""
        return bool(self._resumed) or self._announces

    async def run(self, begin: Callable[[], AsyncGenerator[Content, None]]) -> AsyncGenerator[Content, None]:
        """What SGLang's handler gets to see.

        Args:
            begin: asks the engine.

        Raises:
            ContinuationError: the request cannot be resumed.
        """
        if not self._can_continue:
            raise ContinuationError(f"{RESUME_FIELD} cannot be served with --incremental-streaming-output")
        told, steps = await self._told_before()
        text = "".join(told)
        rest = self._extend() if self._resumed else None
        if self._chunks is not None:
            self._chunks.holding = self._announces
        replay_is_due = bool(self._resumed) and self._chunks is not None and self._path != GENERATE
        async with aclosing(begin() if rest != 0 else _once(self._ended())) as contents:
            async for content in contents:
                if self._resumed:
                    self._correct(content, text)
                # Not earlier: until the engine's first word a refusal can still become a status.
                if replay_is_due and not _failed(content):
                    async for before in self._replay(content, told):
                        yield before
                replay_is_due = False
                for step in steps.of(content) if self._chunks is not None else (content,):
                    yield step
                # The handler asks for more, so that all events of this content have been made.
                if self._announces and self._chunks is not None and finish_of(content) is None:
                    await self._chunks.release(steps.taken())

    async def _told_before(self) -> tuple[list[str], Steps]:
        """Text of the resumed ids, in the pieces that a parser heard, and the steps that follow."""
        decode = _decoder(self._manager.tokenizer, self._obj.sampling_params)
        if self._parsed:
            pieces = Pieces(decode, self._prompt)
            heard = []
            for token in self._resumed:
                heard.append(pieces.add(token))
                await _give_way(len(heard))
            told = [piece for piece in heard if piece is not None]
            steps: Steps = ParsedSteps(pieces, seen=len(self._resumed), length=sum(map(len, told)))
            ends_whole = not heard or heard[-1] is not None
        else:
            context = self._prompt[-CONTEXT_TOKENS:]
            told = [decode([*context, *self._resumed])[len(decode(context)) :]] if self._resumed else []
            cleanness = Cleanness(_whole_tokens(self._manager), decode)
            ends_whole = cleanness.after(self._resumed)
            steps = PlainSteps(cleanness, seen=len(self._resumed))
        if not ends_whole:
            raise ContinuationError(f"{RESUME_FIELD} ends in the middle of a character: send ids as they were told")
        return told, steps

    def _extend(self) -> int | None:
        """Append the ids to the prompt.

        Returns:
            How many output tokens are left; None without a limit.
        """
        obj, count = self._obj, len(self._resumed)
        sampling = {**(self._manager.preferred_sampling_params or {}), **obj.sampling_params}
        limit = sampling.get("max_new_tokens", _DEFAULT_LIMIT)
        rest = None if limit is None else limit - count
        if rest is not None and rest < 0:
            raise ContinuationError(f"{RESUME_FIELD} has {count} ids, at most {limit} output tokens were asked for")
        changes = {
            "max_new_tokens": rest,
            "min_new_tokens": max(0, (sampling.get("min_new_tokens") or 0) - count),
            "custom_params": {**(sampling.get("custom_params") or {}), RESUMED_COUNT: count},
        }
        obj.sampling_params = {**obj.sampling_params, **changes}
        obj.input_ids = [*self._prompt, *self._resumed]
        return rest

    def _correct(self, content: Content, text: str) -> None:
        """Count and show the resumed ids as output, not as prompt."""
        meta, count, prompt = content["meta_info"], len(self._resumed), len(self._prompt)
        changes: dict[str, Any] = {}
        if "prompt_tokens" in meta:
            # Output that an earlier request has left in the cache is no cached prompt.
            changes |= {"prompt_tokens": prompt, "cached_tokens": min(meta.get("cached_tokens", 0), prompt)}
        if "completion_tokens" in meta:
            changes["completion_tokens"] = meta["completion_tokens"] + count
        finish = meta.get("finish_reason")
        if finish is not None and "length" in finish:
            changes["finish_reason"] = {**finish, "length": finish["length"] + count}
        meta.update(changes)
        content["text"] = text + (content.get("text") or "")
        content["output_ids"] = [*self._resumed, *(content.get("output_ids") or ())]
        if "prompt_token_ids" in content:
            content["prompt_token_ids"] = content["prompt_token_ids"][:prompt]

    async def _replay(self, first: Content, told: list[str]) -> AsyncGenerator[Content, None]:
        """Let the handler see what was told before, unheard.

        Args:
            first: the engine's first content.
            told: text in the pieces that it came in.
        """
        chunks = self._chunks
        if chunks is None:
            return
        counts = {"completion_tokens": len(self._resumed), "output_token_logprobs_length": 0}
        meta = {**first["meta_info"], "finish_reason": None, "input_token_logprobs": [], **counts}
        text = ""
        chunks.muted = True
        for number, piece in enumerate(told, start=1):
            text += piece
            yield {**first, "text": text, "output_ids": self._resumed, "meta_info": meta}
            await _give_way(number)
        chunks.muted = False

    def _ended(self) -> Content:
        """All output tokens were told: only the end is missing."""
        meta = {
            "id": self._obj.rid,
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(self._prompt),
            "completion_tokens": 0,
            "reasoning_tokens": 0,
            "cached_tokens": 0,
            "output_token_logprobs_length": 0,
            "weight_version": self._manager.config_value("weight_version"),
        }
        return {"text": "", "output_ids": [], "meta_info": meta}


async def _give_way(number: int) -> None:
    """Long work, of which this is a part, must not keep other streams waiting."""
    if number % _BATCH == 0:
        await asyncio.sleep(0)


async def _once(content: Content) -> AsyncGenerator[Content, None]:
    yield content


def _is_repeatable(obj: Any, path: str) -> bool:
    """Whether another engine could tell everything that goes with the tokens."""
    sampling = obj.sampling_params
    if not isinstance(sampling, dict) or (sampling.get("n") or 1) != 1 or (sampling.get("beam_width") or 1) != 1:
        return False
    whole = obj.return_hidden_states or obj.return_routed_experts or obj.return_sampling_mask
    return not whole and not (obj.return_logprob and path == GENERATE)


def _failed(content: Content) -> bool:
    return (finish_of(content) or {}).get("status_code") is not None


def _decoder(tokenizer: Any, sampling: dict[str, Any]) -> Decode:
    """Text of ids, by the tokenizer's call and the flags that SGLang's detokeniser uses."""
    skip = sampling.get("skip_special_tokens")
    skip = True if skip is None else skip
    size = len(tokenizer)

    def known(ids: Sequence[int]) -> list[int]:
        # Models have ids that their tokenizer has not; SGLang reads them as its first.
        return [token if 0 <= token < size else 0 for token in ids]

    if not getattr(tokenizer, "is_fast", False):
        from sglang.srt.utils.patch_tokenizer import decode_without_hf_kwargs  # noqa: PLC0415

        return lambda ids: str(decode_without_hf_kwargs(tokenizer, known(ids), skip))
    spaces = sampling.get("spaces_between_special_tokens")
    spaces = True if spaces is None else spaces

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(known(ids), skip_special_tokens=skip, spaces_between_special_tokens=spaces))

    return decode


def _whole_tokens(manager: Any) -> WholeTokens:
    whole: WholeTokens | None = getattr(manager, _WHOLE_TOKENS_ATTRIBUTE, None)
    if whole is None:
        decode = _decoder(manager.tokenizer, {"skip_special_tokens": False})
        whole = WholeTokens(decode, manager.model_config.vocab_size)
        setattr(manager, _WHOLE_TOKENS_ATTRIBUTE, whole)
    return whole
