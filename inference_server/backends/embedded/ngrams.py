"""Guesses of the next tokens: what followed the last few tokens when they came before.

Code, quotes and answers that repeat their prompt are full of such places. A guess is computed together
with the token before it, and kept as far as the sampler draws the same tokens from the same random
numbers, so that the output is the one without guesses.

Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding), as in vLLM and SGLang.
"""

from __future__ import annotations

LENGTHS = (4, 3, 2)
"""Lengths of the n-grams that are looked up, in this order."""


class Ngrams:
    """The n-grams of one sequence, each with where it was last."""

    def __init__(self, tokens: list[int], most: int) -> None:
        """
        Args:
            tokens: of the sequence, as it grows.
            most: tokens to guess at once.
        """
        self._tokens = tokens
        self._most = most
        self._count = most
        self._follow: dict[tuple[int, ...], int] = {}
        """N-gram -> position of the token behind it."""
        self._end = 0

    def guess(self, most: int) -> list[int]:
        """Return tokens that may come next, at most `most`; none if this is new."""
        tokens = self._tokens
        for end in range(self._end, len(tokens)):
            for length in LENGTHS:
                if length <= end:
                    self._follow[tuple(tokens[end - length : end])] = end
        self._end = len(tokens)
        for length in LENGTHS:
            start = self._follow.get(tuple(tokens[-length:])) if length <= len(tokens) else None
            if start is not None:
                return tokens[start : start + min(most, self._count)]
        return []

    def learn(self, num_guessed: int, num_right: int) -> None:
        """Guess further ahead where guesses are right, and less far where they are not."""
        if num_right == num_guessed:
            self._count = min(2 * self._count, self._most)
        else:
            self._count = num_right + 1
