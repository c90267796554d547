"""Prompts of about a wanted number of tokens, made of random words. Pure."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from kllm.bench.plan import Planned

BLOCK_TOKENS = 512

# Short and common, so that most tokenizers give each about one token.
_TEXT = (
    "able about above across after again air all also always among and animal answer apple area arm around ask "
    "away back ball bank base bear beat become bed before begin behind below best better big bird black blue boat "
    "body book both box bread bring brother brown build bus but buy call came can car care carry cat cause center "
    "change child city class clear close cold color come common cook corn could country course cover cross cry "
    "cut dark day deep did different dog door down draw dream dress drive dry each early earth east easy eat end "
    "enough even ever every eye face fact fall family far farm fast father feel feet few field fight fill find "
    "fine fire first fish five floor fly follow food foot for form found four free friend from front full game "
    "gave get girl give glass gold good got great green ground group grow had half hand happy hard has have head "
    "hear heart heat heavy help here high hill hold home horse hot hour house how hundred ice idea inch island "
    "just keep kind king knew know"
)
_SPACED = [f"{word} " for word in _TEXT.split()]

DEFAULT_CHARACTERS_PER_TOKEN = 4.0


@dataclass(frozen=True)
class Calibration:
    """How a server counts the tokens of prompts.

    Attributes:
        characters_per_token: of random words.
        overhead_tokens: of every prompt: begin of text, chat template.
        is_measured: False when the server does not tell what it counts, and the numbers are a guess.
    """

    characters_per_token: float
    overhead_tokens: float
    is_measured: bool = True

    @classmethod
    def guess(cls) -> Calibration:
        """For a server that does not tell its counts."""
        return cls(DEFAULT_CHARACTERS_PER_TOKEN, 0.0, is_measured=False)

    @classmethod
    def of(cls, short: tuple[int, int], long: tuple[int, int]) -> Calibration:
        """The line through two prompts, each as characters and tokens."""
        (few, few_tokens), (many, many_tokens) = short, long
        if many <= few or many_tokens <= few_tokens:
            return cls.guess()
        characters_per_token = (many - few) / (many_tokens - few_tokens)
        return cls(characters_per_token, max(0.0, few_tokens - few / characters_per_token))

    def characters(self, tokens: int) -> int:
        """Length of a prompt that counts as so many tokens; 1 or more."""
        return max(1, round((tokens - self.overhead_tokens) * self.characters_per_token))


class Prompts:
    """Makes the prompt of every planned request; the same seed makes the same.

    Args:
        calibration: of the server.
        seed: a prompt depends on it and on its place in the plan, or on its blocks.
    """

    def __init__(self, calibration: Calibration, *, seed: int) -> None:
        self._calibration = calibration
        self._seed = seed
        self._block_characters = max(1, round(BLOCK_TOKENS * calibration.characters_per_token))
        self._block = functools.lru_cache(maxsize=4096)(self._make_block)

    def prompt(self, planned: Planned) -> str:
        """Random words; blocks with equal ids have equal text."""
        characters = self._calibration.characters(planned.input_tokens)
        text = "".join(self._block(block) for block in planned.blocks)[:characters]
        if len(text) < characters:
            text += words(characters - len(text), np.random.default_rng([self._seed, 1, planned.index]))
        return text

    def _make_block(self, block: int) -> str:
        return words(self._block_characters - 1, np.random.default_rng([self._seed, 2, block])) + " "


def words(characters: int, rng: np.random.Generator) -> str:
    """Random words that fill exactly so many characters; the last may be cut."""
    text = ""
    while len(text) < characters:
        # An average word and its space have about 5 characters.
        drawn = rng.integers(0, len(_SPACED), size=(characters - len(text)) // 4 + 1)
        text += "".join([_SPACED[index] for index in drawn.tolist()])
    text = text[: max(0, characters)]
    # A space at the end would be counted by some tokenizers and not by others.
    return f"{text[:-1]}a" if text.endswith(" ") else text
