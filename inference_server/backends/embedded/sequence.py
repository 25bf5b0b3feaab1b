"""One request on the engine thread: its tokens, what is known of them, and when it ends."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import DataError
from headway.contracts.routed_experts import RoutedExperts
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import (
    LLMDelta,
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    StopReason,
    TopLogprobs,
)
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.embedded.grammar import GrammarState
from inference_server.backends.embedded.kv_cache import CacheRow
from inference_server.backends.embedded.ngrams import Ngrams


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller that waits, and its event loop: touched on that loop only."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[LLMResponse]
    on_delta: Callable[[LLMDelta], None] | None

    def take(self, news: LLMDelta | LLMResponse | Exception) -> None:
        """Hand over a delta, the response or the error."""
        if self.future.done():
            return
        if isinstance(news, LLMResponse):
            self.future.set_result(news)
        elif isinstance(news, Exception):
            self.future.set_exception(news)
        elif self.on_delta is not None:
            try:
                self.on_delta(news)
            except Exception as error:  # noqa: BLE001 - other callers' news come after this
                self.future.set_exception(error)


@dataclass(eq=False)
class Sequence:
    """Prompt and output of one request, from arrival to answer."""

    request: LLMRequest
    stop_ids: frozenset[int]
    stop_text: StopText | None
    uniforms: random.Random
    arrival: float
    caller: Caller
    tokens: list[int]
    """Prompt, then output."""
    grammar: GrammarState | None = None
    ngrams: Ngrams | None = None
    """None where no tokens are guessed."""
    row: CacheRow | None = None
    logprobs: list[float] = field(default_factory=list)
    runs: list[tuple[PolicyVersion, int, int]] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    left: list[NDArray[np.int32]] = field(default_factory=list)
    """Ids left to draw from at each output position, if the request asks for its sampling mask."""
    mask_tokens: int = 0
    """Number of ids in `left`."""
    prompt_logprobs: dict[int, float] = field(default_factory=dict)
    """Position in the prompt -> logprob."""
    prompt_top: dict[int, TopLogprobs] = field(default_factory=dict)
    first_token: float | None = None
    cached_tokens: int | None = None
    num_recomputes: int = 0
    is_cancelled: bool = False
    """Set by the caller's thread when it no longer waits."""
    _points: list[float] = field(default_factory=list)

    @staticmethod
    def of(
        req: LLMRequest,
        caller: Caller,
        eos_ids: frozenset[int],
        tokenizer: TextTokenizer | None,
        seeds: random.Random,
        grammar: GrammarState | None = None,
        speculative_tokens: int = 0,
    ) -> Sequence:
        """A request that just came.

        Args:
            eos_ids: what ends it besides its own stops.
            seeds: where a seed comes from if it brings none.
        Raises:
            DataError: it has stop strings, and there is no tokenizer.
        """
        gconfig = req.gconfig
        stop_text = None
        if gconfig.stop:
            if tokenizer is None:
                raise DataError("stop strings need a tokenizer; this model directory has none")
            stop_text = StopText(gconfig.stop, tokenizer)
        tokens = list(req.input_ids)
        can_guess = speculative_tokens > 0 and grammar is None and not _looks_back(gconfig)
        return Sequence(
            request=req,
            stop_ids=frozenset(gconfig.stop_token_ids) | eos_ids,
            stop_text=stop_text,
            uniforms=random.Random(seeds.random() if gconfig.seed is None else gconfig.seed),
            arrival=time.monotonic(),
            caller=caller,
            tokens=tokens,
            grammar=grammar,
            ngrams=Ngrams(tokens, speculative_tokens) if can_guess else None,
        )

    @property
    def adapter(self) -> str:
        """Name of the adapter that computes beside the base; empty for the base alone."""
        return self.request.adapter or ""

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.input_ids)

    @property
    def num_output(self) -> int:
        """Sampled tokens."""
        return len(self.logprobs)

    @property
    def output(self) -> list[int]:
        """Sampled tokens."""
        return self.tokens[self.num_prompt :]

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are in the cache."""
        row = self.row  # read once: the engine may take it away while another thread asks
        return 0 if row is None else row.length

    @property
    def pending(self) -> int:
        """Tokens that must be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    def guess(self) -> list[int]:
        """Return tokens that may follow the last one, to be checked in one step with it."""
        if self.ngrams is None:
            return []
        left = self.request.gconfig.max_new_tokens - self.num_output - 1
        return self.ngrams.guess(left) if left > 0 else []

    @property
    def has_started(self) -> bool:
        """True if it was ever given a row."""
        return self.cached_tokens is not None

    @property
    def scored_from(self) -> int | None:
        """First prompt position whose logprob is still wanted; None when none is."""
        start = self.request.logprob_start
        if start is None:
            return None
        start = max(1, start)
        while start in self.prompt_logprobs:
            start += 1
        return start if start < self.num_prompt else None

    def uniform(self, ahead: int = 0) -> float:
        """The point in [0, 1) at which the next token is drawn, or one behind it: the same until it is
        drawn, however often the step is tried."""
        while len(self._points) <= ahead:
            self._points.append(self.uniforms.random())
        return self._points[ahead]

    def append(
        self,
        token: int,
        logprob: float,
        version: PolicyVersion,
        top: TopLogprobs | None,
        now: float,
        left: NDArray[np.int32] | None = None,
    ) -> None:
        """Record a sampled token.

        Raises:
            DataError: the grammar cannot be followed any further.
        """
        if self.grammar is not None:
            self.grammar.take(token)
        position = self.num_output
        del self._points[:1]
        if self.first_token is None:
            self.first_token = now
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.top.append(top)
        if left is not None:
            self.left.append(left)
            self.mask_tokens += len(left)
        start = self.runs.pop()[1] if self.runs and self.runs[-1][0] == version else position
        self.runs.append((version, start, position + 1))

    def end(self) -> tuple[StopReason, int | str | None] | None:
        """Why it is over after the last token, and what matched; None while it goes on."""
        gconfig = self.request.gconfig
        if self.num_output >= gconfig.min_new_tokens and self.num_output:
            last = self.tokens[-1]
            if last in self.stop_ids:
                return "stop", last
            if self.stop_text is not None:
                found = self.stop_text.find(self.output)
                if found is not None:
                    return "stop", found
        if self.num_output >= gconfig.max_new_tokens:
            return "length", None
        return None

    def response(self, reason: StopReason, match: int | str | None, now: float) -> LLMResponse:
        """The answer."""
        scores, tops = self._prompt_scores()
        return LLMResponse(
            rid=self.request.rid,
            output_tokens=self.output,
            output_logprobs=self.logprobs,
            version_runs=self.runs,
            stop_reason=reason,
            stop_match=match,
            latency_s=now - self.arrival,
            ttft_s=(now if self.first_token is None else self.first_token) - self.arrival,
            top_logprobs=self.top if self.request.top_logprobs else None,
            sampling_mask=SamplingMask.of(self.left) if self.left else None,
            routed_experts=self._experts() if self.request.routed_experts else None,
            prompt_logprobs=scores,
            prompt_top_logprobs=tops,
            cached_tokens=self.cached_tokens or 0,
            num_recomputes=self.num_recomputes,
        )

    def _experts(self) -> RoutedExperts | None:
        """Those of all computed tokens; none of a dense model, or while nothing is computed."""
        row = self.row
        known = [] if row is None else row.experts[: len(self.tokens) - 1]
        return RoutedExperts(np.stack(known)) if known else None

    def _prompt_scores(
        self,
    ) -> tuple[list[float | None] | None, list[TopLogprobs | None] | None]:
        start = self.request.logprob_start
        if start is None:
            return None, None
        positions = range(start, self.num_prompt)
        tops = [self.prompt_top.get(p) for p in positions] if self.request.top_logprobs else None
        return [self.prompt_logprobs.get(p) for p in positions], tops


class StopText:
    """Looks for stop strings where the last token may have completed one."""

    def __init__(self, stops: tuple[str, ...], tokenizer: TextTokenizer) -> None:
        self._stops = stops
        self._tokenizer = tokenizer
        # A character takes at most four tokens (one per byte of UTF-8).
        self._window = 4 * max(len(stop) for stop in stops) + 4

    def find(self, output: list[int]) -> str | None:
        """The stop string that the last token completed, if it did."""
        tail = output[-self._window :]
        text = self._tokenizer.decode(tail)
        if not any(stop in text for stop in self._stops):
            return None
        known = len(self._tokenizer.decode(tail[:-1]).rstrip("\N{REPLACEMENT CHARACTER}"))
        for stop in self._stops:
            if text.find(stop, max(0, known - len(stop) + 1)) >= 0:
                return stop
        return None  # it was there before, when stopping was too early


def _looks_back(gconfig: SamplingConfig) -> bool:
    """True if the distribution of a token depends on which ones were sampled before, or how many."""
    return bool(
        gconfig.presence_penalty
        or gconfig.frequency_penalty
        or gconfig.repetition_penalty != 1.0
        or gconfig.min_new_tokens
    )
