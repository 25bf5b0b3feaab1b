"""Headway: asynchronous rollout and training for reinforcement learning of language models.

The names below are what other projects import: the client with its requests and results, what rewards,
workflows, filters and tools are made of, and errors. Each is loaded when it is first used, so that
`import headway` costs nothing, and none of them loads torch. `docs/python.md` lists them; `__init__.pyi`
shows them to type checkers. Headway's own modules import one another directly; only `__version__` is
taken from here.
"""

__version__ = "0.1.0"

_NAMES = {
    "headway.contracts.config.base": ("Config", "ComponentConfig", "WorkflowRef"),
    "headway.contracts.config.sampling": ("SamplingConfig",),
    "headway.contracts.errors": (
        "BackendError",
        "ConfigError",
        "Conflict",
        "DataError",
        "Fenced",
        "Forbidden",
        "RolloutsFailed",
        "NotFound",
        "QueueFull",
        "RequestTooLong",
        "RewardError",
        "RewardOutage",
        "ServiceError",
        "NotEnoughWork",
        "StateError",
        "SyncError",
        "Unauthorized",
        "UnknownName",
        "VersionMoved",
        "WaitTimeout",
        "WorkflowError",
    ),
    "headway.contracts.http.rewards": ("AnswerToScore",),
    "headway.contracts.types": (
        "ConsumerSpec",
        "LLMRequest",
        "LLMResponse",
        "Message",
        "Prompt",
        "RewardResult",
        "RolloutHandle",
        "RolloutRequest",
        "Trajectory",
        "TrajectoryBatch",
        "TrajectoryGroup",
        "Turn",
        "VersionBounds",
    ),
    "gateway.components.shared_services": ("SharedServices", "ProgramResult", "Program"),
    "gateway.filters.base": ("Filter", "register_filter"),
    "gateway.rewards.base": ("Answer", "AsyncReward", "make_reward", "register_reward"),
    "headway.text.tokenizer": ("TextTokenizer",),
    "gateway.trajectories.sample": ("Sample",),
    "gateway.trajectories.transcript": ("Transcript",),
    "gateway.tools.base": ("Tool", "ToolError", "register_tool"),
    "gateway.workflows.base": ("RolloutContext", "Workflow", "register_workflow"),
    "gateway.workflows.conversation": ("Conversation",),
    "gateway.workflows.turn_sampler": ("TurnSampler",),
    "gateway.workflows.single_turn": ("SingleTurn", "SingleTurnArgs"),
    "headway.runtime.inference_client": ("RemoteInferenceEngine",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *sorted(_MODULES)]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
