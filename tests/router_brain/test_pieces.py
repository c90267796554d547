"""Token ids put together from those of pieces are those of the whole text, whatever the tokenizer does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_brain.brain_helpers import write_model
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from kllm_router.frontend.pieces import PieceCache
from kllm_router.frontend.tokenizer import ModelTokenizer

TURN, END, LONGER = "<|turn|>", "<|end|>", "<|turn|>>"
WORDS = ["hello", " world", "  ", "\n", "é", "東京", "<", "|", ">", "<|", "tu", "rn|>", "x" * 300, "a b c " * 60]
TEXTS = st.lists(st.sampled_from([*WORDS, TURN, END, LONGER]), max_size=24).map("".join)


def trained(**flags: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["?"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["hello world hello turn", "a b c a b c", "東京 é"], trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, **flags) for t in (TURN, END, LONGER)])
    return tokenizer


def with_prefix_at_the_start() -> Tokenizer:
    """As Llama's: the first piece of a text begins as if a space were before it, others do not."""
    tokenizer = trained()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


def with_prefix_everywhere() -> Tokenizer:
    tokenizer = trained()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    return tokenizer


def with_a_normalised_token() -> Tokenizer:
    tokenizer = trained()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens([AddedToken("hello", normalized=True)])
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": trained,
    "prefix at the start": with_prefix_at_the_start,
    "prefix everywhere": with_prefix_everywhere,
    "normalised token": with_a_normalised_token,
    "spaces before": lambda: trained(lstrip=True),
    "spaces after": lambda: trained(rstrip=True),
    "whole words": lambda: trained(single_word=True),
}
TOKENIZERS = {name: maker() for name, maker in MAKERS.items()}


def encoder(tokenizer: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    return lambda texts: [list(e.ids) for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
@settings(max_examples=80, deadline=None)
def test_pieces_give_the_ids_of_the_whole(name: str, texts: list[str]):
    tokenizer = TOKENIZERS[name]
    cache = PieceCache(list(tokenizer.get_added_tokens_decoder().values()))
    encode = encoder(tokenizer)

    for text in [*texts, *texts]:
        assert cache.ids(text, encode) == encode([text])[0]


def test_the_next_turn_tokenises_its_new_text_only():
    encode, asked = encoder(TOKENIZERS["bytes"]), []

    def counting(texts: list[str]) -> list[list[int]]:
        asked.extend(texts)
        return encode(texts)

    cache = PieceCache(list(TOKENIZERS["bytes"].get_added_tokens_decoder().values()))
    turns = [f"{TURN}{number} {'hello world ' * 100}" for number in range(6)]
    cache.ids("".join(turns[:5]) + TURN, counting)
    asked.clear()

    assert cache.ids("".join(turns) + TURN, counting) == encode(["".join(turns) + TURN])[0]
    assert asked == [turns[5], TURN]


def test_it_forgets_what_was_used_longest_ago_and_stays_within_its_bytes():
    tokenizer = TOKENIZERS["bytes"]
    cache = PieceCache(list(tokenizer.get_added_tokens_decoder().values()), max_bytes=20_000)
    encode = encoder(tokenizer)

    for number in range(200):
        text = f"{TURN}{number} {'hello ' * 100}"
        assert cache.ids(text, encode) == encode([text])[0]
        assert cache.held_bytes <= 20_000

    assert cache.held_bytes > 10_000


def test_threads_may_share_it():
    tokenizer = TOKENIZERS["bytes"]
    cache = PieceCache(list(tokenizer.get_added_tokens_decoder().values()), max_bytes=5_000)
    encode, wrong = encoder(tokenizer), []

    def work(seed: int) -> None:
        for number in range(100):
            text = "".join(f"{TURN}{(seed + number + n) % 7} {'hello ' * 60}" for n in range(3))
            if cache.ids(text, encode) != encode([text])[0]:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
    assert 0 <= cache.held_bytes <= 5_000


def test_a_models_rendered_prompts_go_through_it(tmp_path: Path):
    tokenizer = ModelTokenizer(write_model(tmp_path / "model"))
    text = "".join(f"<|im_start|>user\n{'Hello world ' * 80}{n}<|im_end|>\n" for n in range(4))

    assert tokenizer.encode_rendered(text) == tokenizer.encode(text)
    assert tokenizer._pieces.held_bytes > 0
