"""Choice of the tokens that run in the next step.

A sequence has `pending` tokens that are not in the cache: its whole prompt at first, one while it
decodes, everything again after its row was taken away. Each step takes the one pending token of
every decoding sequence, then chunks of pending prompts up to a budget, oldest first, and admits
waiting sequences while there are places, memory and budget.

A prompt is computed once: a newcomer copies the longest common prefix from a row that the weights
now in place computed, and waits while a running sequence is still computing more of it.

Where the next tokens of a decoding sequence can be guessed, it takes them along to be checked.

When memory is short, the youngest running sequence gives up its row and waits at the front; it goes
on from its tokens, so nothing is lost. None is admitted then until another one ends. A sequence that
finds no memory although it is alone is refused: it would wait for nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from headway.contracts.errors import BackendError
from inference_server.backends.embedded.attention import Span
from inference_server.backends.embedded.kv_cache import CacheRow, KVCache
from inference_server.backends.embedded.sequence import Sequence

SHORTEST_SHARED = 8
"""Prefixes shorter than this are computed rather than copied."""
MAX_GUESSES = 64
"""Guessed tokens in a step: more of them would cost more than they save."""
SCORED_CHUNK = 256
"""Prompt tokens per step of a sequence whose prompt is scored: each needs a row of logits."""


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """A sequence's share of a step."""

    sequence: Sequence
    span: Span
    guess: tuple[int, ...] = ()
    """Tokens at the end of the span that are not known yet."""

    @property
    def is_last(self) -> bool:
        """True if nothing is pending after this step: a token is sampled."""
        return self.span.end - len(self.guess) == len(self.sequence.tokens)


class Scheduler:
    """Waiting and running sequences over one cache."""

    def __init__(self, cache: KVCache[Any], max_sequences: int, max_prefill_tokens: int) -> None:
        self._cache = cache
        self.max_sequences = max_sequences
        self._max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """Running sequences in order of admission."""
        self.is_draining = False
        """True while sequences that have not started must wait."""
        self._is_short_of_memory = False
        self.num_preemptions = 0
        """Rows that were taken away for want of memory."""
        self.refused: list[Sequence] = []
        """Sequences that there is no memory for, until they are answered with an error."""

    @property
    def sequences(self) -> list[Sequence]:
        """All of them, oldest admission first."""
        return [*self.running, *self.waiting]

    @property
    def reserved_tokens(self) -> int:
        """Number of tokens that fit into the rows of running sequences."""
        rows = [sequence.row for sequence in list(self.running)]
        return self._cache.reserved_tokens(row for row in rows if row is not None)

    @property
    def has_work(self) -> bool:
        """True if a step would do something."""
        return bool(self.running) or any(self._may_start(s) for s in self.waiting)

    def schedule(self) -> list[ScheduledTokens]:
        """Return the next step; its rows are allocated."""
        self._ensure_rows()
        scheduled: list[ScheduledTokens] = []
        first = 0
        budget, guesses = self._max_prefill_tokens, MAX_GUESSES
        for sequence in self.running:
            chunk = self._chunk(sequence, budget)
            if chunk:
                guess = self._guess(sequence, guesses)
                guesses -= len(guess)
                first = self._take(scheduled, sequence, chunk, first, guess)
                budget -= chunk if sequence.pending > 1 else 0
        while budget > 0:
            newcomer = self._admit()
            if newcomer is None:
                break
            chunk = self._chunk(newcomer, budget)
            first = self._take(scheduled, newcomer, chunk, first)
            budget -= chunk
        return scheduled

    def follow(self, scheduled: list[ScheduledTokens]) -> list[ScheduledTokens] | None:
        """Return the step after a launched one, whose tokens are not known yet; its rows are allocated.

        Returns:
            One token of every sequence; None where that may not be all there is to do, or too much.
        """
        if len(scheduled) != len(self.running) or not all(work.is_last for work in scheduled):
            return None
        if self.waiting and len(self.running) < self.max_sequences:
            return None
        if any(s.num_output + 1 >= s.request.gconfig.max_new_tokens for s in self.running):
            return None
        following: list[ScheduledTokens] = []
        for work in scheduled:
            row, end = work.span.row, work.span.end
            if work.sequence.row is not row or not self._cache.extend(row, end + 1):
                return None
            following.append(
                ScheduledTokens(work.sequence, Span(row, end, end + 1, len(following)))
            )
        return following

    def finish(self, sequence: Sequence) -> None:
        """A sequence is over: its row stays for prompts that begin alike."""
        self._leave(sequence, keep=True)

    def discard(self, sequence: Sequence) -> None:
        """A sequence failed: nothing of it may be read again."""
        self._leave(sequence, keep=False)

    def make_room(self) -> None:
        """A step found no memory for its own work: the youngest sequence gives way, or the only one."""
        if len(self.running) > 1:
            self._give_way()
        elif self.running:
            sequence = self.running[0]
            self.discard(sequence)
            self.refused.append(sequence)

    def retract(self) -> None:
        """All running sequences give up their rows and wait, in order, to be computed again."""
        for sequence in self.running[::-1]:
            self._preempt(sequence)
        self._is_short_of_memory = False

    def clear(self) -> None:
        """Forget all sequences; memory stays as it is, the device may have failed."""
        self.running.clear()
        self.waiting.clear()

    def _leave(self, sequence: Sequence, keep: bool) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
            self._is_short_of_memory = False
        else:
            self.waiting.remove(sequence)
        if sequence.row is not None:
            row, length = sequence.row, len(sequence.tokens)
            if row.length > length:  # it ended before the last token that was guessed
                self._cache.truncate(row, length, row.length)
            self._cache.release(row, keep)
            sequence.row = None

    def _ensure_rows(self) -> None:
        """Extend every running sequence's row by the tokens of this step."""
        for sequence in list(self.running):
            while sequence.row is not None:
                row = self._cache.grow(sequence.row, len(sequence.tokens))
                if row is not None:
                    sequence.row = row
                    break
                self._give_way()

    def _give_way(self) -> None:
        self._preempt(self.running[-1])
        self.num_preemptions += 1
        self._is_short_of_memory = True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if sequence.row is not None:
            self._cache.release(sequence.row, keep=False)
            sequence.row = None
        sequence.num_recomputes += 1
        self.waiting.appendleft(sequence)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        if sequence.pending == 1:
            return 1
        if sequence.scored_from is not None:
            budget = min(budget, SCORED_CHUNK)
        return min(sequence.pending, budget)

    def _guess(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Guess what follows the last token, where there is memory for it."""
        guess = sequence.guess()[:most] if sequence.pending == 1 else []
        if not guess or sequence.row is None:
            return ()
        row = self._cache.grow(sequence.row, len(sequence.tokens) + len(guess))
        if row is None:
            return ()
        sequence.row = row
        return tuple(guess)

    def _take(
        self,
        scheduled: list[ScheduledTokens],
        sequence: Sequence,
        count: int,
        first: int,
        guess: tuple[int, ...] = (),
    ) -> int:
        row = sequence.row
        if row is None:
            raise RuntimeError(f"{sequence.request.rid} runs without a row")
        start, count = row.length, count + len(guess)
        scheduled.append(ScheduledTokens(sequence, Span(row, start, start + count, first), guess))
        return first + count

    def _admit(self) -> Sequence | None:
        """Give a row to the first waiting sequence that can use it now."""
        if len(self.running) >= self.max_sequences:
            return None
        if self._is_short_of_memory and self.running:
            return None
        for sequence in self.waiting:
            if not self._may_start(sequence):
                continue
            donor, shared = self._longest_shared(sequence)
            if self._is_worth_waiting(sequence, shared):
                continue
            row: CacheRow | None = self._cache.allocate(len(sequence.tokens), donor, shared)
            if row is None and self.running:
                self._is_short_of_memory = True
                return None
            if row is None:
                self.waiting.remove(sequence)
                self.refused.append(sequence)
                return None
            row.tokens, row.adapter = sequence.tokens, sequence.adapter
            sequence.row = row
            if sequence.cached_tokens is None:
                sequence.cached_tokens = min(row.length, sequence.num_prompt)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            return sequence
        return None

    def _may_start(self, sequence: Sequence) -> bool:
        return sequence.has_started or not self.is_draining

    def _longest_shared(self, sequence: Sequence) -> tuple[CacheRow | None, int]:
        """The row to copy from, and how many positions: never the last token, whose logits are
        wanted, nor what has to be scored."""
        limit = len(sequence.tokens) - 1
        if sequence.scored_from is not None:
            limit = min(limit, sequence.scored_from - 1)
        best, length = None, SHORTEST_SHARED - 1
        if limit <= length:
            return None, 0
        for row in self._cache:
            if row.is_pure and row.length > length and row.adapter == sequence.adapter:
                reach = min(row.length, limit)
                common = _common_prefix(sequence.tokens, row.tokens, reach, length)
                if common > length:
                    best, length = row, common
        return best, length if best is not None else 0

    def _is_worth_waiting(self, sequence: Sequence, shared: int) -> bool:
        """True if a running sequence is still computing more of the same prefix."""
        if sequence.scored_from is not None:
            return False
        limit = len(sequence.tokens) - 1
        if limit < SHORTEST_SHARED:
            return False
        for other in self.running:
            if other.pending < 2 or other.row is None or not other.row.is_pure:
                continue
            if other.adapter != sequence.adapter:
                continue
            known = max(SHORTEST_SHARED - 1, shared, other.computed)
            reach = min(limit, len(other.tokens))
            if _common_prefix(sequence.tokens, other.tokens, reach, known) > known:
                return True
        return False


def no_memory(sequence: Sequence) -> BackendError:
    """Return the error of a refused sequence."""
    return BackendError(
        f"request {sequence.request.rid}: no memory for {len(sequence.tokens)} tokens with nothing else "
        "running; lower backend.max_context or backend.max_prefill_tokens"
    )


def _common_prefix(one: list[int], two: list[int], limit: int, known: int) -> int:
    """Length of the common prefix, at most `limit`; 0 if it is not longer than `known`."""
    if limit <= known or one[known] != two[known]:
        return 0  # most rows end here
    if one[:limit] == two[:limit]:
        return limit
    return next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
