"""Output bound to a JSON schema or a regular expression: which tokens may come next.

llguidance knows the grammar; the sampler draws from the tokens that it allows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import DataError
from headway.text.tokenizer import TextTokenizer

LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=20_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
"""Bound on one request: what is too complex is refused after a fraction of a second."""
MAX_MESSAGE = 300
"""Characters of llguidance's message."""


class Grammars:
    """Grammars over the tokens of one model."""

    def __init__(
        self, tokenizer: TextTokenizer | None, vocab_size: int, eos_ids: frozenset[int]
    ) -> None:
        """
        Args:
            tokenizer: None refuses all grammars.
            vocab_size: columns of the logits.
            eos_ids: what ends an output once the grammar allows it to end.
        """
        self._text = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids

    def state_of(self, gconfig: SamplingConfig) -> GrammarState:
        """Return the start of the grammar of a request; may take a second, and gives way meanwhile.

        Raises:
            DataError: it is none, or this model cannot be bound to one.
        """
        if self._text is None or not self._eos_ids:
            raise DataError(
                "json_schema and regex need a tokenizer and an end of sequence; this model directory "
                "lacks one of them"
            )
        if gconfig.regex is not None:
            grammar = LLMatcher.grammar_from_regex(gconfig.regex)
        else:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(gconfig.json_schema))
        return GrammarState(LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS))

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        assert self._text is not None
        eos_ids = sorted(self._eos_ids)
        vocabulary = _Vocabulary(self._text, self._vocab_size, eos_ids[0])
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=eos_ids)


class GrammarState:
    """A grammar, and what one output has used up of it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._check()

    def allowed(self) -> NDArray[np.bool_]:
        """Return [V], true for tokens that may come next.

        Raises:
            DataError: the grammar is too complex.
        """
        found = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) != 0
        self._check()
        return found

    def take(self, token: int) -> None:
        """Go on behind a token.

        Raises:
            DataError: as `allowed`.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())
            raise DataError(f"json_schema or regex cannot be followed: {reason[:MAX_MESSAGE]}")


class _Vocabulary:
    """Tokens as llguidance reads them."""

    bos_token_id = None

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._text = tokenizer
        self.eos_token_id = eos_token_id
        self.special_token_ids = tokenizer.special_ids
        special = set(self.special_token_ids)
        self.tokens: Sequence[bytes] = [
            b"" if token in special else tokenizer.token_bytes(token) for token in range(vocab_size)
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text that has to come next: the first of them is the only one allowed then."""
        whole = text.encode() if isinstance(text, str) else text
        ids = self._text.encode(whole.decode(errors="replace"), add_special_tokens=False)
        texts = [self.tokens[number] if number < len(self.tokens) else b"" for number in ids]
        if all(texts) and b"".join(texts) == whole:
            return ids
        return self._spelled(whole)  # some tokenizers put a blank in front

    def _spelled(self, text: bytes) -> list[int]:
        """The longest token that the text begins with, again and again."""
        found: list[int] = []
        while text:
            lengths = range(min(len(text), self._longest), 0, -1)
            token = next(
                (self._numbers[text[:n]] for n in lengths if text[:n] in self._numbers), None
            )
            if token is None:
                break  # no output can go on: it is refused
            found.append(token)
            text = text[len(self.tokens[token]) :]
        return found

    @cached_property
    def _numbers(self) -> dict[bytes, int]:
        return {text: number for number, text in enumerate(self.tokens) if text}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._numbers), default=0)
