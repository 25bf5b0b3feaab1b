"""Workflows by name: prompt -> scored trajectory.

A workflow is made per rollout with the tokenizer, the sampling parameters and its own arguments
(checked against its `Args` model), and plays each sample of the group with `run`. It sees generation
and reward as two callables, so the same workflow runs in a test, on one server and on a fleet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.registry import Registry
from headway.contracts.types import LLMRequest, LLMResponse, Prompt, RewardResult, Trajectory
from headway.rollout.tokenizer import TextTokenizer
from headway.runtime.config import validate_config

Generate = Callable[[LLMRequest], Awaitable[LLMResponse]]
Score = Callable[[str, str], Awaitable[RewardResult]]
"""`(prompt_text, completion_text) -> verdict`; the row's data is bound already."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory to play."""

    rollout_id: str
    prompt: Prompt
    index: int


class Workflow(Protocol):
    """Plays one sample."""

    Args: ClassVar[type[BaseModel]]

    def __init__(self, tokenizer: TextTokenizer, gconfig: SamplingConfig, args: Any) -> None: ...

    async def run(self, sample: Sample, generate: Generate, score: Score) -> Trajectory:
        """Play and score one sample; what it raises fails the rollout."""


WORKFLOWS: Registry[type[Workflow]] = Registry(
    "workflow",
    {"single_turn": "headway.rollout.workflows.single_turn:SingleTurn"},
    entry_point_group="headway.workflows",
)


def register_workflow(name: str, target: str | type[Workflow]) -> None:
    """Add a workflow: a class, or `"module:attribute"` for a lazy one."""
    WORKFLOWS.register(name, target)


def make_workflow(
    name: str, args: dict[str, Any], tokenizer: TextTokenizer, gconfig: SamplingConfig
) -> Workflow:
    """Build a workflow.

    Raises:
        UnknownName: nobody registered the name.
        ConfigError: the arguments do not fit its schema.
    """
    workflow = WORKFLOWS.get(name)
    return workflow(tokenizer, gconfig, validate_config(workflow.Args, args))
