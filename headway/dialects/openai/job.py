"""A request on its way: its choices are generated together, and answered whole or as chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from headway.contracts.types import LLMResponse, PolicyVersion
from headway.dialects.openai.choice import Choice
from headway.dialects.served_model import ServedModel, all_of, merged


@dataclass(frozen=True)
class CompletionJob:
    """One HTTP request for completions."""

    id: str
    kind: str
    """`object` of the answer."""
    chunk_kind: str
    """`object` of a chunk."""
    model_name: str
    choices: Sequence[Choice]
    num_choices: int
    """Choices per prompt: siblings follow each other."""
    has_usage_chunk: bool = False
    prompt_token_ids: Sequence[int] | None = None
    """Prompt of a chat whose client wants token ids: vLLM's clients read it beside the choices."""
    created: int = field(default_factory=lambda: int(time.time()))

    async def answer(self, model: ServedModel) -> dict[str, Any]:
        """The answer in one piece."""
        responses = await all_of(model, [choice.request for choice in self.choices])
        pairs = zip(self.choices, responses, strict=True)
        return {
            **self._envelope(self.kind),
            "choices": [choice.whole(response) for choice, response in pairs],
            "usage": self._usage(responses),
            "metadata": _metadata(responses, model),
            **_span(responses, model),
            **self._prompt(),
        }

    async def chunks(self, model: ServedModel) -> AsyncGenerator[dict[str, Any]]:
        """The answer in parts; leaving early cancels what runs."""
        responses: dict[int, LLMResponse] = {}
        requests = [choice.request for choice in self.choices]
        async with aclosing(merged(model, requests)) as parts:
            is_open = False
            async for index, part in parts:
                if not is_open:  # only now: a refused request has no first chunk
                    is_open = True
                    for opening in filter(None, (choice.open() for choice in self.choices)):
                        yield self._chunk([opening]) | self._prompt()
                choice = self.choices[index]
                if isinstance(part, LLMResponse):
                    responses[index] = part
                    metadata = _metadata([part], model)
                    last = self._chunk([choice.end(part)]) | {"metadata": metadata}
                    yield last | _span([part], model)
                elif (chunk := choice.add(part)) is not None:
                    yield self._chunk([chunk])
        if self.has_usage_chunk:
            everyone = [responses[index] for index in range(len(self.choices))]
            yield self._chunk([]) | {"usage": self._usage(everyone)}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model_name}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._envelope(self.chunk_kind), "choices": choices}
        return chunk | ({"usage": None} if self.has_usage_chunk else {})

    def _prompt(self) -> dict[str, Any]:
        ids = self.prompt_token_ids
        return {} if ids is None else {"prompt_token_ids": ids}

    def _usage(self, responses: Sequence[LLMResponse]) -> dict[str, Any]:
        """Each prompt counts once; its cached tokens are those that no sibling had to compute."""
        firsts = range(0, len(self.choices), self.num_choices)
        prompt_tokens = sum(len(self.choices[first].request.input_ids) for first in firsts)
        cached_tokens = sum(
            min(r.cached_tokens for r in responses[first : first + self.num_choices])
            for first in firsts
        )
        completion_tokens = sum(len(response.output_tokens) for response in responses)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


def _metadata(responses: Sequence[LLMResponse], model: ServedModel) -> dict[str, str]:
    """The newest version that sampled; text, as OpenAI's metadata is."""
    return {"weight_version": str(_span(responses, model)["weight_version_end"])}


def _span(responses: Sequence[LLMResponse], model: ServedModel) -> dict[str, PolicyVersion]:
    """The oldest and the newest version that sampled."""
    sampled = [version for response in responses for version, _, _ in response.version_runs]
    return {
        "weight_version_start": min(sampled, default=model.version),
        "weight_version_end": max(sampled, default=model.version),
    }
