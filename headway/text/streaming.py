"""Token ids -> the text a client reads, whole or as it grows.

Invariants: a piece never ends inside a UTF-8 character; nothing is given out that a stop string
could still take back; the pieces of a stream are, end to end, the text of the whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Sequence

from headway.contracts.types import LLMResponse
from headway.text.tokenizer import TextTokenizer

UNFINISHED = "\ufffd"
"""Character by which tokenizers show one that lacks some of its bytes."""
PART = "\u25cc"
"""Shown for a token whose character a later one completes: a dotted circle, which holds no letter yet."""
MAX_HELD = 16
"""Unfinished tokens after which the oldest must be bytes that will never be a character."""
MAX_CHARACTER = 4
"""Tokens that one character can take: one per byte."""


class TextStream:
    """The text of one sequence, without the stop that ended it."""

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        stop: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """
        Args:
            tokenizer: None gives no text.
            stop: strings that may end the sequence, and are then removed.
            stop_token_ids: tokens that may end it, and are then left out.
            skip_special_tokens: show no special tokens.
        """
        self._pieces = None
        if tokenizer is not None:
            decode = tokenizer.decode
            self._pieces = _Pieces(lambda ids: decode(ids, skip_special_tokens))
        self._stop = tuple(stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stop_token: int | None = None
        self._held = ""
        self._last = 0
        """Offset of the last token's text in what is held: a stop ends behind it."""

    def feed(self, ids: Sequence[int]) -> str:
        """Text that became certain with these tokens."""
        for token in ids:
            if self._stop_token is not None:  # the sequence went on behind it
                self._append(self._stop_token)
                self._stop_token = None
            if token in self._stop_token_ids:
                self._stop_token = token
            else:
                self._append(token)
        return self._take(self._certain())

    def finish(self, stop_match: int | str | None = None) -> str:
        """The rest of the text.

        Args:
            stop_match: what ended the sequence (`LLMResponse.stop_match`).
        """
        if self._stop_token is not None and self._stop_token != stop_match:
            self._append(self._stop_token)
        if self._pieces is not None:
            self._held += self._pieces.rest()
        end = self._find(stop_match) if isinstance(stop_match, str) else -1
        return self._take(len(self._held) if end < 0 else end)

    def _append(self, token: int) -> None:
        if self._pieces is not None:
            self._last = len(self._held)
            self._held += self._pieces.add(token)

    def _find(self, stop: str) -> int:
        """Return the offset of a stop that the last token completed; earlier ones ended nothing."""
        return self._held.find(stop, max(0, self._last - len(stop) + 1))

    def _certain(self) -> int:
        """Length of the text that no stop string can shorten any more."""
        certain = len(self._held)
        for stop in self._stop:
            found = self._find(stop)
            if found >= 0:
                certain = min(certain, found)
            for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
                if self._held.endswith(stop[:length]):
                    certain = min(certain, len(self._held) - length)
                    break
        return certain

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._last = max(0, self._last - length)
        return text


def text_of(response: LLMResponse, stream: TextStream) -> str:
    """The text of a whole response."""
    return stream.feed(response.output_tokens) + stream.finish(response.stop_match)


def token_texts(tokens: Iterable[bytes]) -> list[str]:
    """Each token as a reader sees it, from what each adds to the text in UTF-8.

    A character whose bytes are spread over tokens stands with the last of them; the others are `PART`.
    Bytes that are no character are `UNFINISHED`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    for added in tokens:
        text = decoder.decode(added)
        texts.append(text if text or not added else PART)
    if rest := decoder.decode(b"", True):
        held = next(at for at in reversed(range(len(texts))) if texts[at])
        texts[held] = texts[held].removesuffix(PART) + rest
    return texts


class _Pieces:
    """Token ids -> pieces of text that later tokens cannot change.

    Tokens are decoded behind those of the piece before them, since some tokenizers write the first
    token of a text in another way.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []
        self._fresh: list[int] = []

    def add(self, token: int) -> str:
        """Text that this token completes."""
        self._fresh.append(token)
        text = self._text(self._fresh)
        if text and not text.endswith(UNFINISHED):
            return self._give(len(self._fresh), text)
        return self._give_broken() if len(self._fresh) >= MAX_HELD else ""

    def rest(self) -> str:
        """Return the text that was held back, unfinished as it is."""
        return self._give(len(self._fresh), self._text(self._fresh))

    def _text(self, ids: list[int]) -> str:
        before = self._decode(self._before)
        return self._decode(self._before + ids)[len(before) :]

    def _give(self, count: int, text: str) -> str:
        self._before, self._fresh = self._fresh[:count], self._fresh[count:]
        return text

    def _give_broken(self) -> str:
        """Release bytes that no later token can complete, up to the end of a character."""
        whole = self._text(self._fresh)
        for count in range(len(self._fresh) - MAX_CHARACTER, 0, -1):
            head = self._text(self._fresh[:count])
            if head + self._decode(self._fresh[count:]) == whole:
                return self._give(count, head)
        return ""
