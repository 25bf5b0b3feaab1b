"""Logprobs in OpenAI's two forms: columns for completions, one record per token for chats."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from headway.contracts.types import TopLogprobs
from headway.text.tokenizer import TextTokenizer

UNLIKELY = -9999.0
"""Value that OpenAI writes for a token without probability."""


class TokenNames:
    """Text form of tokens, where JSON wants text."""

    def __init__(self, tokenizer: TextTokenizer | None, as_ids: bool | None = False) -> None:
        """
        Args:
            tokenizer: None knows no texts.
            as_ids: call every token by its id.
        """
        self._tokenizer = tokenizer
        self._as_ids = bool(as_ids)

    def bytes_of(self, token: int) -> bytes | None:
        """Return a token's UTF-8; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def name(self, token: int) -> str:
        """Return a token's text, or its bytes where it is part of a character, or else its id."""
        raw = None if self._as_ids else self.bytes_of(token)
        if raw is None:
            return f"token_id:{token}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class LogprobColumns:
    """The `logprobs` of a completion, which a stream sends in parts."""

    def __init__(self, names: TokenNames, count: int) -> None:
        """
        Args:
            names: how tokens are written.
            count: most likely tokens to report at each position, besides the sampled one.
        """
        self._names = names
        self._count = count
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[TopLogprobs | None] | None,
    ) -> dict[str, Any]:
        """The part of these tokens; a token without a logprob is the first of a prompt."""
        tops = top or [None] * len(tokens)
        return {
            "tokens": [self._names.name(token) for token in tokens],
            "token_logprobs": [None if p is None else finite(p) for p in logprobs],
            "top_logprobs": [
                None if logprob is None else self._top(token, logprob, best)
                for token, logprob, best in zip(tokens, logprobs, tops, strict=True)
            ],
            "text_offset": [self._advance(token) for token in tokens],
        }

    def _top(self, token: int, logprob: float, best: TopLogprobs | None) -> dict[str, float]:
        ranked = [*(best or [])[: self._count], (token, logprob)]
        return {self._names.name(each): finite(value) for each, value in ranked}

    def _advance(self, token: int) -> int:
        offset = self._offset
        self._offset += len(self._text.decode(self._names.bytes_of(token) or b""))
        return offset


def token_records(
    names: TokenNames,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[TopLogprobs] | None,
) -> list[dict[str, Any]]:
    """The `logprobs.content` of a chat."""
    tops: Sequence[TopLogprobs] = top or [[] for _ in tokens]
    return [
        {
            **_record(names, token, logprob),
            "top_logprobs": [_record(names, *each) for each in best],
        }
        for token, logprob, best in zip(tokens, logprobs, tops, strict=True)
    ]


def finite(logprob: float) -> float:
    """JSON knows no infinity."""
    return logprob if logprob > UNLIKELY else UNLIKELY


def _record(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    raw = names.bytes_of(token)
    return {
        "token": names.name(token),
        "logprob": finite(logprob),
        "bytes": None if raw is None else list(raw),
    }
