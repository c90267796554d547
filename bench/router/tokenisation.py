"""What the next turn of a conversation costs to tokenise, with and without the cache of its pieces.

python bench/router/tokenisation.py FOLDER [--turns N]

FOLDER is a model's (tokenizer.json, chat template). Each turn adds a question and an answer of about 500 words.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from kllm_router.frontend.openai import Model
from kllm_router.frontend.pieces import PieceCache
from kllm_router.frontend.tokenizer import ModelTokenizer

RESULTS = Path(__file__).parent / "results" / "tokenisation.json"
_WORDS = (
    "the", "of", "model", "cache", "prompt", "token", "naïve", "system", "answers", "request", "2026", "3.14",
    "latency", "between", "Grüße", "instances", "however", "measure", "(see below)", "\n\n", "def f(x):", "東京",
)  # fmt: skip


def rendered(model: Model, turns: int) -> list[str]:
    """The prompt of each turn."""
    if model.template is None:
        raise SystemExit("the model has no chat template")
    rng = random.Random(0)
    messages: list[dict[str, Any]] = [{"role": "system", "content": _text(rng)}]
    prompts = []
    for _ in range(turns):
        messages.append({"role": "user", "content": _text(rng)})
        prompts.append(model.template.render(messages))
        messages.append({"role": "assistant", "content": _text(rng)})
    return prompts


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=500))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=120)
    given = parser.parse_args()
    prompts = rendered(Model(given.folder, "model"), given.turns)
    cached, plain = ModelTokenizer(given.folder), ModelTokenizer(given.folder)
    # Without any special token there is one piece, and without room nothing is kept.
    plain._pieces = PieceCache([], max_bytes=0)
    rows = []
    for turn, prompt in enumerate(prompts, start=1):
        times = []
        for tokenizer in (plain, cached):
            began = time.thread_time()
            ids = tokenizer.encode_rendered(prompt)
            times.append((time.thread_time() - began) * 1e3)
        if plain.encode_rendered(prompt) != ids:
            raise SystemExit(f"turn {turn}: the ids differ")
        if turn in {1, 2, 10, 30, 60, given.turns}:
            rows.append(
                {"turn": turn, "tokens": len(ids), "whole_ms": round(times[0], 2), "cached_ms": round(times[1], 2)}
            )
    held = round(cached._pieces.held_bytes / 2**20, 2)
    document = {"model": given.folder.name, "turns": rows, "cache_mib": held, "ids_equal": True}
    print(json.dumps(document, indent=1))
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
