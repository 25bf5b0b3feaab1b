"""A sample to generate: one trajectory of a group, and the generation to make it with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headway.contracts.types import LLMRequest, LLMResponse, Prompt

Generate = Callable[[LLMRequest], Awaitable[LLMResponse]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory to generate."""

    rollout_id: str
    prompt: Prompt
    index: int
