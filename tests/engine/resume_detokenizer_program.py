"""Feeds SGLang's own detokeniser random tokens, cut in random ways; prints where our view of their text differs.

A program of its own, because importing SGLang changes the process.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kllm_engine.cpu
from kllm_engine.models import tiny
from kllm_engine.sglang.arguments import import_environment
from kllm_engine.sglang.pieces import CONTEXT_TOKENS, Pieces
from kllm_engine.sglang.resume import _decoder

os.environ.update(import_environment("cpu"))
sys.path.insert(0, str(Path(kllm_engine.cpu.__file__).parent / "stubs"))

from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from transformers import AutoTokenizer

TRIALS = 1500
CHANCE = random.Random(5)


def detokeniser(tokenizer: Any) -> Any:
    """SGLang's own, without its process."""
    made: Any = DetokenizerManager.__new__(DetokenizerManager)
    made.tokenizer, made.vocab_size, made.decode_status = tokenizer, len(tokenizer), {}
    made.disable_tokenizer_batch_decode = made.is_tool_call_parser_gpt_oss = False
    return made


def texts(detokeniser: Any, prompt: list[int], groups: list[list[int]], *, skip: bool) -> list[str]:
    """All text after each group of tokens that come at once."""
    context = prompt[-CONTEXT_TOKENS:]
    rid, told = f"{CHANCE.getrandbits(64)}", []
    for number, group in enumerate(groups):
        output = SimpleNamespace(
            rids=[rid], decoded_texts=[""], decode_ids=[group if number else context + group],
            read_offsets=[len(context)], finished_reasons=[None], no_stop_trim=[False], skip_special_tokens=[skip],
            spaces_between_special_tokens=[True],
        )  # fmt: skip
        told += detokeniser._decode_batch_token_id_output(output)
    return list(accumulate(told))


def examine(detokeniser: Any) -> str | None:
    """One random output; what differs."""
    skip = CHANCE.random() < 0.5
    prompt = [CHANCE.randrange(512) for _ in range(8)]
    # Many bytes that are no characters, special tokens, and ids that the tokenizer has not.
    ids = [CHANCE.choice((CHANCE.randrange(512), CHANCE.randrange(3, 259), CHANCE.randrange(3))) for _ in range(24)]
    pieces = Pieces(_decoder(detokeniser.tokenizer, {"skip_special_tokens": skip}), prompt)
    ours = [pieces.add(token) for token in ids]
    clean = [0, *(count for count, piece in enumerate(ours, start=1) if piece is not None)]
    single = ["", *texts(detokeniser, prompt, [[token] for token in ids], skip=skip)]
    cuts = sorted({0, len(ids), *CHANCE.sample(range(1, len(ids)), 6)})
    groups = [ids[start:end] for start, end in pairwise(cuts)]
    grouped = dict(zip(cuts[1:], texts(detokeniser, prompt, groups, skip=skip), strict=True))
    start = CHANCE.choice(clean[:-1])
    later = ["", *texts(detokeniser, prompt + ids[:start], [[token] for token in ids[start:]], skip=skip)]
    for count in clean:
        if single[count] != "".join(piece or "" for piece in ours[:count]):
            return f"one by one, after {count} of {ids}"
        if grouped.get(count, single[count]) != single[count]:
            return f"in groups, after {count} of {ids}"
        if count >= start and single[start] + later[count - start] != single[count]:
            return f"resumed at {start}, after {count} of {ids}"
    return None


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiny.build(Path(folder))
        ours = detokeniser(AutoTokenizer.from_pretrained(folder))
        differing = [told for told in (examine(ours) for _ in range(TRIALS)) if told is not None]
    sys.stdout.write("\n".join([*differing, f"examined {TRIALS}", ""]))


if __name__ == "__main__":
    main()
