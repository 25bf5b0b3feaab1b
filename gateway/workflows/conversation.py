"""Text between the turns of a row: a chat template's words, or plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.contracts.errors import DataError
from headway.contracts.types import Message, Prompt
from headway.runtime.offload import size_of
from headway.text.tokenizer import STAND_IN, TextTokenizer


class Conversation:
    """The conversation of one sample, as messages and as the tokens that it adds to the row.

    A prompt of messages goes on with the chat template; one of text goes on with text as it is.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt: Prompt,
        tools: Sequence[Mapping[str, Any]] = (),
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            tools: functions that the model may call, as the template shows them.
            template_args: further variables of the template.

        Raises:
            DataError: the prompt is token ids, behind which the form of a turn is unknown.
        """
        if prompt.input_ids is not None:
            raise DataError(
                f"the prompt of group {prompt.group_id!r} is token ids, which do not say how a further "
                "turn is written; send messages or text"
            )
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._tools = tools
        self._template_args = template_args
        self._said: list[int] = []
        """Messages that the policy sampled."""
        self.messages: list[dict[str, Any]] = [m.model_dump() for m in prompt.messages or ()]
        """The conversation so far; without the prompt, if that is text."""

    @property
    def size(self) -> int:
        """Characters so far, and of what the template writes besides, for `offload`."""
        prompt = len(self._prompt.text or "")
        return prompt + size_of([self.messages, list(self._tools), self._template_args])

    def opening(self) -> list[int]:
        """Tokens in front of the first turn.

        Raises:
            DataError: the prompt is empty, or does not fit the template.
        """
        if self._prompt.messages is None:
            return self._tokenizer.encode_prompt(self._prompt)
        return self._tokenizer.encode_chat(self.messages, self._tools, self._template_args)

    def opening_without_tools(self) -> list[int]:
        """The same, had the model no tools."""
        return self._tokenizer.encode_chat(self.messages, (), self._template_args)

    def follow(
        self, sampled: Sequence[int], messages: Sequence[Message | Mapping[str, Any]]
    ) -> list[int]:
        """Tokens between a sampled turn and the next one.

        Args:
            sampled: the turn's tokens.
            messages: what is said to it.

        Raises:
            DataError: the template rewrites earlier messages, or fails on these.
        """
        said = [m.model_dump() if isinstance(m, Message) else dict(m) for m in messages]
        if self._prompt.messages is None:
            text = "".join(message["content"] for message in said)
            bridge = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            bridge = self._tokenizer.encode_bridge(
                sampled, self._history(), said, self._tools, self._template_args
            )
        self._said.append(len(self.messages))
        spoken = {"role": "assistant", "content": self._tokenizer.decode(list(sampled))}
        self.messages += [spoken, *said]
        return bridge

    def _history(self) -> list[dict[str, Any]]:
        """The conversation with a stand-in for all that was sampled: templates rewrite thinking."""
        history = list(self.messages)
        for place in self._said:
            history[place] = {"role": "assistant", "content": STAND_IN}
        return history
