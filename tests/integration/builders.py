"""Rollout requests for the quick start's tokenizer."""

from __future__ import annotations

from typing import Any

from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import LLMRequest, Prompt, RolloutRequest

EXACT = ComponentConfig(name="exact", args={"pattern": "[0-9]"})


def rollout(
    name: str,
    max_new_tokens: int = 8,
    group_size: int = 2,
    reward: ComponentConfig = EXACT,
    data: dict[str, Any] | None = None,
    consumer: str = "default",
) -> RolloutRequest:
    """One prompt group whose responses have exactly `max_new_tokens` tokens."""
    return RolloutRequest(
        rollout_id=name,
        consumer=consumer,
        prompt=Prompt(
            group_id=name, group_size=group_size, text="123456", data=data or {"answer": "1"}
        ),
        reward=reward,
        gconfig=SamplingConfig(max_new_tokens=max_new_tokens, ignore_eos=True),
    )


def generation(name: str, max_new_tokens: int, **sampling: Any) -> LLMRequest:
    """One sequence of exactly `max_new_tokens` tokens."""
    return LLMRequest(
        rid=name,
        input_ids=(1, 4, 5, 6),
        gconfig=SamplingConfig(max_new_tokens=max_new_tokens, ignore_eos=True, **sampling),
    )
