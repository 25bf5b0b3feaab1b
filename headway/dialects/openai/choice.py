"""One choice of an answer: a sequence in the words of its API, whole or as a stream of chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse
from headway.text.streaming import TextStream

FINISH_REASONS = {"stop": "stop", "length": "length", "interrupt": "abort"}
"""`abort` is an extension: the request was aborted, and its tokens are a prefix."""


class Choice(ABC):
    """Assembles one choice; an instance serves one answer, whole or streamed."""

    def __init__(
        self, index: int, request: LLMRequest, text: TextStream, has_token_ids: bool
    ) -> None:
        self.index = index
        self.request = request
        self._text = text
        self._has_token_ids = has_token_ids
        self._num_seen = 0
        self._is_open = False

    def open(self) -> dict[str, Any] | None:
        """Return the first chunk of a stream, before anything was sampled, if there is one."""
        return None

    def add(self, delta: LLMDelta) -> dict[str, Any] | None:
        """The choice in a chunk; None if these tokens give the client nothing yet."""
        self._num_seen += len(delta.output_tokens)
        news = self._news(self._text.feed(delta.output_tokens), delta, is_last=False)
        if news is None and not self._has_token_ids:
            return None
        return self._chunk(news or self._nothing(), delta.output_tokens)

    def end(self, response: LLMResponse) -> dict[str, Any]:
        """The choice in its last chunk."""
        seen = self._num_seen
        rest = LLMDelta(
            output_tokens=response.output_tokens[seen:],
            output_logprobs=response.output_logprobs[seen:],
            version=max((version for version, _, _ in response.version_runs), default=0),
            top_logprobs=response.top_logprobs and response.top_logprobs[seen:],
        )
        text = self._text.feed(rest.output_tokens) + self._text.finish(response.stop_match)
        news = self._news(text, rest, is_last=True) or self._nothing()
        chunk = self._chunk(news, rest.output_tokens)
        chunk["finish_reason"] = self._finish_reason(response)
        return chunk | ({"version_runs": response.version_runs} if self._has_token_ids else {})

    @abstractmethod
    def whole(self, response: LLMResponse) -> dict[str, Any]:
        """The choice of an answer in one piece."""

    @abstractmethod
    def _news(self, text: str, delta: LLMDelta, is_last: bool) -> dict[str, Any] | None:
        """Return the content of a chunk with this text and these tokens; None if there is none."""

    @abstractmethod
    def _nothing(self) -> dict[str, Any]:
        """Return the content of an empty chunk."""

    def _finish_reason(self, response: LLMResponse) -> str:
        return FINISH_REASONS[response.stop_reason]

    def _chunk(self, news: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        chunk = {"index": self.index, **news, "finish_reason": None}
        if self._has_token_ids:
            chunk["token_ids"] = tokens
            if not self._is_open:
                chunk["prompt_token_ids"] = self.request.input_ids
        self._is_open = True
        return chunk

    def _extension(self, response: LLMResponse) -> dict[str, Any]:
        """Return the fields of a whole choice beyond the standard."""
        if not self._has_token_ids:
            return {}
        return {
            "token_ids": response.output_tokens,
            "prompt_token_ids": self.request.input_ids,
            "version_runs": response.version_runs,
        }
