"""A choice of a completion: text, and logprobs in columns."""

from __future__ import annotations

from typing import Any

from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse
from headway.dialects.openai.choice import Choice
from headway.dialects.openai.completion_request import CompletionRequest
from headway.dialects.openai.logprobs import LogprobColumns, TokenNames
from headway.text.streaming import TextStream, text_of
from headway.text.tokenizer import TextTokenizer


class CompletionChoice(Choice):
    def __init__(
        self,
        index: int,
        request: LLMRequest,
        body: CompletionRequest,
        tokenizer: TextTokenizer | None,
        echo: str,
    ) -> None:
        """
        Args:
            index: place among the choices.
            request: the sequence.
            body: what was asked for.
            tokenizer: None gives no text.
            echo: text in front of the sampled text; empty without `body.echo`.
        """
        text = TextStream(tokenizer, body.stops, request.gconfig.stop_token_ids)
        super().__init__(index, request, text, body.has_token_ids)
        self._echo = echo
        self._has_prompt_logprobs = bool(body.echo)
        self._columns = None
        if body.logprobs is not None:
            names = TokenNames(tokenizer, body.return_tokens_as_token_ids)
            self._columns = LogprobColumns(names, body.logprobs)

    def open(self) -> dict[str, Any] | None:
        if not self._echo:
            return None
        return self._chunk({"text": self._echo, "logprobs": None}, [])

    def whole(self, response: LLMResponse) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": self._echo + text_of(response, self._text),
            "logprobs": self._logprobs(response),
            "finish_reason": self._finish_reason(response),
            **self._extension(response),
        }

    def _news(self, text: str, delta: LLMDelta, is_last: bool) -> dict[str, Any] | None:
        if self._columns is None or not delta.output_tokens:
            return {"text": text, "logprobs": None} if text else None
        logprobs = self._columns.add(delta.output_tokens, delta.output_logprobs, delta.top_logprobs)
        return {"text": text, "logprobs": logprobs}

    def _nothing(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _logprobs(self, response: LLMResponse) -> dict[str, Any] | None:
        if self._columns is None:
            return None
        prompt = self.request.input_ids if self._has_prompt_logprobs else ()
        tokens = [*prompt, *response.output_tokens]
        logprobs = [*(response.prompt_logprobs or ()), *response.output_logprobs]
        top = [*(response.prompt_top_logprobs or ()), *(response.top_logprobs or ())]
        return self._columns.add(tokens, logprobs, top)
