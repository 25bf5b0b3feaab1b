"""Workflows by name: prompt -> scored trajectory.

A workflow is made per rollout with the tokenizer, the sampling parameters and its own arguments
(checked against its `Args` model), and runs each sample of the group with `run`. It sees generation,
reward and the outside as a `RolloutContext`, so the same workflow runs in a test, on one server and on a
fleet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel

from gateway.components.shared_services import SharedServices
from gateway.rewards.base import Answer
from gateway.sessions.chat import Chat
from gateway.sessions.session import Session
from gateway.trajectories.sample import Generate, Sample
from headway.contracts.config.base import WorkflowRef
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import ConfigError
from headway.contracts.http.sessions import SessionResponse
from headway.contracts.registry import Registry
from headway.contracts.types import (
    Prompt,
    RewardResult,
    Trajectory,
)
from headway.runtime.config import validate_config
from headway.text.tokenizer import TextTokenizer

Score = Callable[[Answer], Awaitable[RewardResult]]


class SessionOpener(Protocol):
    """Opens sessions, in which a client runs the turns of a sample."""

    def open(self, sample: Sample, chat: Chat) -> AbstractAsyncContextManager[Session]:
        """Let a client in until the block ends; it waits while too many are open."""

    def describe(self, session: Session, base_url: str | None = None) -> SessionResponse:
        """Return the URLs of a session, and its key.

        Args:
            base_url: what the client reached this service by; None takes its own address.
        """


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """Everything that a workflow uses to run one sample."""

    generate: Generate
    """Samples one sequence to its end; versions and retries are seen to."""
    score: Score
    """The reward that the rollout was submitted with."""
    services: SharedServices
    sessions: SessionOpener | None = None
    """Sessions, in which a client runs the turns; None if this service keeps none."""


def prompt_size(prompt: Prompt) -> int:
    """Characters or tokens, for `offload`."""
    if prompt.input_ids is not None:
        return len(prompt.input_ids)
    return len(prompt.text or "") + sum(len(message.content) for message in prompt.messages or ())


class HasOpening(Protocol):
    """A workflow whose first request is known before it is run."""

    def opening(self, prompt: Prompt) -> list[int]:
        """The tokens of that request.

        Raises:
            DataError: it can never be run.
            RequestTooLong: its text is too long to be encoded.
        """


class Workflow(Protocol):
    """Runs one sample."""

    version: ClassVar[str]
    """Version: changes whenever the same arguments would be run differently."""
    Args: ClassVar[type[BaseModel]]

    def __init__(self, tokenizer: TextTokenizer, gconfig: SamplingConfig, args: Any) -> None: ...

    async def run(self, sample: Sample, context: RolloutContext) -> Sequence[Trajectory]:
        """Run and score one sample; what it raises fails the rollout.

        Returns:
            One trajectory, or several where its history forked, numbered by `branch`.
        """


WORKFLOWS: Registry[type[Workflow]] = Registry(
    "workflow",
    {
        "best_of_n": "gateway.workflows.best_of_n:BestOfN",
        "callback": "gateway.workflows.callback:Callback",
        "multi_turn": "gateway.workflows.multi_turn:MultiTurn",
        "session": "gateway.workflows.session:SessionWorkflow",
        "single_turn": "gateway.workflows.single_turn:SingleTurn",
        "tool_use": "gateway.workflows.tool_use:ToolUse",
    },
    entry_point_group="headway.workflows",
)


def register_workflow(name: str, target: str | type[Workflow]) -> None:
    """Add a workflow with its version: a class, or `"module:attribute"` for a lazy one.

    Raises:
        ConfigError: the name is taken, or the class is no workflow.
    """
    if not isinstance(target, str):
        _check_class(name, target)
    WORKFLOWS.register(name, target)


def get_workflow(name: str) -> type[Workflow]:
    """The class of a workflow.

    Raises:
        UnknownName: nobody registered the name.
        ConfigError: what was registered is no workflow.
    """
    workflow = WORKFLOWS.get(name)
    _check_class(name, workflow)
    return workflow


def _check_class(name: str, workflow: type[Workflow]) -> None:
    missing = [part for part in ("version", "Args", "run") if not hasattr(workflow, part)]
    if missing:
        raise ConfigError(f"workflow {name!r} is {workflow!r}, which lacks {', '.join(missing)}")


def workflow_schema(name: str) -> dict[str, Any]:
    """JSON schema of a workflow's arguments.

    Raises:
        UnknownName: nobody registered the name.
    """
    return get_workflow(name).Args.model_json_schema()


def make_workflow(ref: WorkflowRef, tokenizer: TextTokenizer, gconfig: SamplingConfig) -> Workflow:
    """Build a workflow.

    Raises:
        UnknownName: nobody registered the name.
        ConfigError: the arguments do not fit its schema, or another version is registered.
    """
    workflow = get_workflow(ref.name)
    if ref.version not in (None, workflow.version):
        raise ConfigError(
            f"workflow {ref.name!r} has version {workflow.version!r} here, {ref.version!r} is wanted"
        )
    return workflow(tokenizer, gconfig, validate_config(workflow.Args, ref.args, has_flags=False))
