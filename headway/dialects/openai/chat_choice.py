"""A choice of a chat: a message with text and tool calls, and a record per token."""

from __future__ import annotations

from typing import Any

from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse
from headway.dialects.openai.chat_request import ChatRequest
from headway.dialects.openai.choice import Choice
from headway.dialects.openai.logprobs import TokenNames, token_records
from headway.text.streaming import TextStream, text_of
from headway.text.tokenizer import TextTokenizer
from headway.text.tool_calls import ToolCall, ToolCallStream


class ChatChoice(Choice):
    def __init__(
        self, index: int, request: LLMRequest, body: ChatRequest, tokenizer: TextTokenizer
    ) -> None:
        text = TextStream(tokenizer, body.stops, request.gconfig.stop_token_ids)
        super().__init__(index, request, text, body.has_token_ids)
        as_ids = body.return_tokens_as_token_ids
        self._names = TokenNames(tokenizer, as_ids) if body.logprobs else None
        self._calls = ToolCallStream() if body.offered_tools else None
        self._max_calls = 1 if body.parallel_tool_calls is False else None
        self._num_calls = 0

    def open(self) -> dict[str, Any]:
        return self._chunk({"delta": {"role": "assistant", "content": ""}, "logprobs": None}, [])

    def whole(self, response: LLMResponse) -> dict[str, Any]:
        content, calls = self._split(text_of(response, self._text), is_last=True)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [_written(call) for _, call in calls]
        tokens, logprobs = response.output_tokens, response.output_logprobs
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(tokens, logprobs, response.top_logprobs),
            "finish_reason": self._finish_reason(response),
            **self._extension(response),
        }

    def _news(self, text: str, delta: LLMDelta, is_last: bool) -> dict[str, Any] | None:
        content, calls = self._split(text, is_last)
        logprobs = self._logprobs(delta.output_tokens, delta.output_logprobs, delta.top_logprobs)
        if not (content or calls or (logprobs and delta.output_tokens)):
            return None
        fields: dict[str, Any] = {"content": content} if content else {}
        if calls:
            fields["tool_calls"] = [{"index": place, **_written(call)} for place, call in calls]
        return {"delta": fields, "logprobs": logprobs}

    def _nothing(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def _finish_reason(self, response: LLMResponse) -> str:
        reason = super()._finish_reason(response)
        return "tool_calls" if reason == "stop" and self._num_calls else reason

    def _split(self, text: str, is_last: bool) -> tuple[str, list[tuple[int, ToolCall]]]:
        """Text for the user, and calls with their places."""
        if self._calls is None:
            return text, []
        pieces = self._calls.feed(text) + (self._calls.finish() if is_last else [])
        calls: list[tuple[int, ToolCall]] = []
        for piece in pieces:
            if isinstance(piece, ToolCall) and self._num_calls != self._max_calls:
                calls.append((self._num_calls, piece))
                self._num_calls += 1
        return "".join(piece for piece in pieces if isinstance(piece, str)), calls

    def _logprobs(
        self, tokens: list[int], logprobs: list[float], top: Any
    ) -> dict[str, Any] | None:
        if self._names is None:
            return None
        return {"content": token_records(self._names, tokens, logprobs, top), "refusal": None}


def _written(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
