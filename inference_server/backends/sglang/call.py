"""One request on its way through an SGLang engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.contracts.engines import OnDelta
from headway.contracts.types import LLMDelta, LLMRequest, PolicyVersion
from inference_server.backends.engine_adapters import EngineAdapter
from inference_server.backends.sglang import wire
from inference_server.backends.sglang.wire import EngineOutput

MAX_EVENTS = 512
"""Parts that one call is streamed in, at most: each repeats all before it."""
NO_EVENTS = 1 << 30
"""Tokens per event of a call that is not streamed: its first token comes alone, then all."""
NO_END = 1 << 40


@dataclass(eq=False)
class EngineCall:
    """State of a request before its end."""

    req: LLMRequest
    on_delta: OnDelta | None
    arrival: float
    boundaries: list[tuple[PolicyVersion, int]]
    """Versions, each with its first position."""
    find_adapter: Callable[[str], EngineAdapter]
    """Returns what serves under a name."""
    adapter: EngineAdapter | None = None
    """What the current attempt is sampled with beside the base."""
    rid: str = ""
    """The engine's name of the current attempt; empty while it waits outside of the engine."""
    num_tokens: int = 0
    first_token: float | None = None
    cut: int | None = None
    """Tokens to keep, where we have to look for stop tokens ourselves."""
    is_cutting: bool = False
    is_interrupted: bool = False
    is_sent_back: bool = False
    num_retracts: int = 0
    """Orders of ours that retracted it."""

    def begin(self, rid: str) -> None:
        """Go to the engine, under this name and with the adapter that serves now.

        Raises:
            DataError: its adapter is not loaded any more.
        """
        self.adapter = None if self.req.adapter is None else self.find_adapter(self.req.adapter)
        self.rid = rid

    @property
    def interval(self) -> int:
        """Tokens per event."""
        if self.on_delta is None:
            return NO_EVENTS
        return max(1, self.req.gconfig.max_new_tokens // MAX_EVENTS)

    def cross(self, version: PolicyVersion, lag: int) -> None:
        """Let another version sample from here on; never too early: unsent tokens are older."""
        unsent = self.interval - 1 + lag if self.num_tokens else 0
        self.boundaries.append((version, self.num_tokens + unsent))

    def runs(self) -> wire.Runs:
        """Versions as far as known; the last has no end."""
        if self.adapter is not None:
            return [(self.adapter.version, 0, NO_END)]
        ends = [*(start for _, start in self.boundaries[1:]), NO_END]
        return [(v, start, end) for (v, start), end in zip(self.boundaries, ends, strict=True)]

    def is_discarded(self, output: EngineOutput) -> bool:
        """True if the call starts again after being sent back, without what it has sampled since."""
        has_ended = output.finish is not None and not output.is_aborted
        return self.is_sent_back and not has_ended and not self.is_interrupted

    def take(self, output: EngineOutput, now: float) -> int:
        """Count the new tokens and return their number."""
        if output.tokens and self.first_token is None:
            self.first_token = now
        seen, self.num_tokens = self.num_tokens, len(output.tokens)
        if self.cut is None:
            self.cut = wire.find_stop(self.req.gconfig, output.tokens, seen)
        return max(0, self.num_tokens - seen)

    def hand_on(self, output: EngineOutput, seen: int, runs: wire.Runs) -> None:
        """Tell the reader what came after the first `seen` tokens, one delta per version."""
        if self.on_delta is None:
            return
        logprobs = wire.logprobs_of(output)
        count = self.num_kept(output)
        tops = wire.top_logprobs_of(output, count) if self.req.top_logprobs else None
        for version, first, last in runs:
            start, end = max(first, seen), min(last, count)
            if start < end:
                self.on_delta(
                    LLMDelta(
                        output_tokens=output.tokens[start:end],
                        output_logprobs=logprobs[start:end],
                        version=version,
                        top_logprobs=None if tops is None else tops[start:end],
                    )
                )

    def num_kept(self, output: EngineOutput) -> int:
        """Tokens that are the caller's: up to the stop token, each with its logprob."""
        count = len(output.tokens) if self.cut is None else self.cut
        return min(count, len(wire.logprobs_of(output)))
