"""One load of a tokenizer serves everyone who asks for it in the same way."""

from __future__ import annotations

from kllm_engine.sglang.tokenizers import shared_tokenizer


def test_the_same_question_loads_once_and_another_one_again():
    loads = []

    def load(path, **named):
        loads.append((path, named))
        return object()

    first = shared_tokenizer(load, "/models/a", tokenizer_mode="auto", revision=None)
    assert shared_tokenizer(load, "/models/a", revision=None, tokenizer_mode="auto") is first
    assert shared_tokenizer(load, "/models/a", tokenizer_mode="slow", revision=None) is not first
    assert shared_tokenizer(load, "/models/b", tokenizer_mode="auto", revision=None) is not first
    assert [path for path, _ in loads] == ["/models/a", "/models/a", "/models/b"]
