"""One prompt, tools on the way, one verdict on the last answer.

The model writes `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; the results are shown to it
as `tool` messages, in the words of the chat template, and it goes on. A turn without a call is the
answer, and what a reward scores.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import BaseModel, Field, model_validator

from gateway.components.shared_services import SharedServices
from gateway.tools.base import Tool, ToolError, make_tool, schema_of
from gateway.trajectories.sample import Sample
from gateway.workflows.base import RolloutContext
from gateway.workflows.conversation import Conversation
from gateway.workflows.turn_sampler import TurnSampler
from headway.contracts.config.base import ComponentConfig, Config
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import ConfigError, DataError
from headway.contracts.types import LLMResponse, Prompt, StopReason, Trajectory
from headway.runtime.offload import offload, size_of
from headway.text.tokenizer import TextTokenizer
from headway.text.tool_calls import CLOSE, OPEN, ToolCall, parse_call

END_OF_THINKING = "</think>"
MAX_TOKEN_CHARS = 32
"""Characters per allowed token; longer texts are truncated before they are encoded."""
MAX_RESULT_CHARS = 1 << 18
"""And in any case those longer than this."""


class ToolUseArgs(Config):
    tools: tuple[ComponentConfig, ...] = Field(min_length=1, max_length=64)
    """Registered tools, with their arguments."""
    max_calls: int = Field(8, ge=1, le=1024)
    """Calls per sample, at most; a further one is answered with a refusal, which is an error."""
    max_errors: int = Field(3, ge=0, le=1024)
    """Wrong calls per sample that are answered with what is wrong; one more ends the rollout."""
    max_result_tokens: int = Field(1024, ge=1, le=1_000_000)
    """Maximum tokens of one result; the rest is removed, and the model is told so."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of the whole row, prompt included; None leaves the bound to the server's
    context."""
    open_tag: str = Field(OPEN, min_length=1, max_length=64)
    """Text in front of a call."""
    close_tag: str = Field(CLOSE, min_length=1, max_length=64)
    """Text behind a call."""
    render_tools: bool = True
    """False leaves the tools out of the template: the prompt itself describes them."""
    template_args: dict[str, Any] = {}
    """Further variables of the chat template (`enable_thinking`, ...)."""

    @model_validator(mode="after")
    def _check(self) -> ToolUseArgs:
        if self.open_tag == self.close_tag:
            raise ValueError(f"open_tag and close_tag are both {self.open_tag!r}")
        return self


class ToolUse:
    """Answer with the help of tools; the reward scores the last turn."""

    version: ClassVar[str] = "1"
    Args: ClassVar[type[BaseModel]] = ToolUseArgs

    def __init__(
        self, tokenizer: TextTokenizer, gconfig: SamplingConfig, args: ToolUseArgs
    ) -> None:
        self._tokenizer = tokenizer
        self._gconfig = gconfig
        self._args = args
        tools = [make_tool(config) for config in args.tools]
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise ConfigError(
                f"two tools have one name: {[tool.name for tool in tools]}; the model calls them by name"
            )

    def opening(self, prompt: Prompt) -> list[int]:
        """See `base.HasOpening`."""
        return self._open(self._chat(prompt))

    async def run(self, sample: Sample, context: RolloutContext) -> Sequence[Trajectory]:
        chat = self._chat(sample.prompt)
        opening = await offload(chat.size, self._open, chat)
        sampler = TurnSampler(
            self._tokenizer, self._gconfig, sample, context, opening, self._args.max_tokens
        )
        caller = _ToolCaller(self._tools, self._args, self._tokenizer, context.services)
        shown: list[int] = []
        stop_reason: StopReason | None = None
        while True:
            response = await sampler.next_turn(shown)
            if response is None:
                stop_reason = "length"
                break
            asked = await offload(len(response.output_tokens), self._read_calls, response)
            if not asked or response.stop_reason != "stop":
                break
            records = await caller.answer_all(asked)
            sampler.transcript.annotate(-1, calls=records)
            if caller.num_errors > self._args.max_errors:
                break
            said = [_as_message(record) for record in records]
            size = chat.size + size_of(said)
            shown = await offload(size, chat.follow, response.output_tokens, said)
        result = await sampler.score()
        counts = {"tool_calls": caller.num_calls, "tool_errors": caller.num_errors}
        result = replace(result, details={**result.details, **counts})
        return (sampler.transcript.trajectory(sample, result, stop_reason=stop_reason),)

    def _read_calls(self, response: LLMResponse) -> list[ToolCall | str]:
        """The calls of a turn; some models write the tags as special tokens."""
        ids = response.output_tokens
        spoken = ids[:-1] if ids and response.stop_match == ids[-1] else ids
        text = self._tokenizer.decode(spoken, skip_special_tokens=False)
        return find_calls(text, self._args.open_tag, self._args.close_tag)

    def _chat(self, prompt: Prompt) -> Conversation:
        if prompt.messages is None:
            raise DataError(
                f"the prompt of group {prompt.group_id!r} is no chat; tools are described and answered "
                "in the words of a chat template, so send messages"
            )
        shown = self._tools.values() if self._args.render_tools else ()
        schemas = [schema_of(tool) for tool in shown]
        return Conversation(self._tokenizer, prompt, schemas, self._args.template_args)

    def _open(self, chat: Conversation) -> list[int]:
        opening = chat.opening()
        if self._args.render_tools and opening == chat.opening_without_tools():
            raise DataError(
                "the chat template does not describe the tools to the model; describe them in a message, "
                "and set render_tools: false"
            )
        return opening


@dataclass
class _ToolCaller:
    """Answers the calls of one sample, and counts them."""

    tools: Mapping[str, Tool]
    args: ToolUseArgs
    tokenizer: TextTokenizer
    services: SharedServices
    num_calls: int = 0
    num_errors: int = 0

    async def answer_all(self, calls: Sequence[ToolCall | str]) -> list[dict[str, Any]]:
        """The calls of a turn in order, up to the error that ends the rollout."""
        records = []
        for call in calls:
            records.append(await self.answer(call))
            if self.num_errors > self.args.max_errors:
                break
            await asyncio.sleep(0)
        return records

    async def answer(self, call: ToolCall | str) -> dict[str, Any]:
        """One call with its result, as viewers see it."""
        record: dict[str, Any]
        if isinstance(call, str):
            record = {"written": call}
        else:
            record = {"name": call.name, "arguments": json.loads(call.arguments)}
        try:
            result = await self._call(call)
            return {**record, "result": await offload(len(result), self._cut, result)}
        except ToolError as error:
            self.num_errors += 1
            return {**record, "result": self._cut(f"Error: {error}"), "is_error": True}

    async def _call(self, call: ToolCall | str) -> str:
        if isinstance(call, str):
            raise ToolError(
                f'{call[:200]!r} is no call; write {{"name": <function>, "arguments": {{...}}}} as JSON '
                f"between {self.args.open_tag} and {self.args.close_tag}"
            )
        tool = self.tools.get(call.name)
        if tool is None:
            raise ToolError(
                f"no function is named {call.name[:64]!r}; known: {', '.join(self.tools)}"
            )
        if self.num_calls == self.args.max_calls:
            raise ToolError(f"all {self.num_calls} calls are used up; give your answer")
        self.num_calls += 1
        return await tool.call(json.loads(call.arguments), self.services)

    def _cut(self, result: str) -> str:
        """A result within its bounds, in which nothing ends the message; half a character is replaced."""
        limit = self.args.max_result_tokens
        head = result[: min(limit * MAX_TOKEN_CHARS, MAX_RESULT_CHARS)]
        text = self.tokenizer.defuse(head.encode(errors="replace").decode())
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= limit and len(head) == len(result):
            return text
        kept = self.tokenizer.decode(ids[:limit], skip_special_tokens=False)
        return f"{kept}\n[cut: {len(result)} characters]"


def find_calls(text: str, opening: str = OPEN, closing: str = CLOSE) -> list[ToolCall | str]:
    """The calls in a turn, in order; a block that holds none comes as it was written.

    What the model thought before it spoke is no call. A block that was never closed ends with the text.
    """
    _, _, spoken = text.rpartition(END_OF_THINKING)
    bodies = [block.partition(closing)[0] for block in spoken.split(opening)[1:]]
    return [parse_call(body) or body.strip() for body in bodies]


def _as_message(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "name": record.get("name", ""), "content": record["result"]}
