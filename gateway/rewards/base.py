"""Rewards by name: `register_reward`, `make_reward`.

A reward is made once per name and arguments, and called with an `Answer`. It may be slow or hang, because
`scoring.Scorer` runs it in a process that can be killed. What it raises is recorded as a failure of the
rollout and never becomes a score.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, get_args, runtime_checkable

from gateway.components.arguments import args_model
from gateway.components.shared_services import SharedServices
from headway.contracts.codec import MAX_REWARD
from headway.contracts.errors import RewardError
from headway.contracts.registry import Registry
from headway.contracts.types import RewardResult, Verdict
from headway.runtime.user_frames import user_frames

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
MAX_ERROR_CHARS = 1000
"""Maximum characters that are kept of what a reward raised."""
MAX_DETAILS_CHARS = 1 << 18
"""Maximum characters of a reward's details, as JSON: they are stored with the trajectory."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion to score, and what it answers."""

    prompt: str
    completion: str
    data: Mapping[str, Any]
    """The rest of the prompt's row."""
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    """The prompt as a chat, with `role` and `content`; empty if it was text or tokens."""


RewardFunction = Callable[[Answer], float | RewardResult]
"""Trusted, pure and synchronous: it runs in a process that can be killed. As attributes it may have

- `quick(answer) -> float | RewardResult | None`, a method that settles easy cases in microseconds, in
  time linear in the answer; it runs on the event loop, and None hands the answer to the process;
- `hang_verdict: Verdict | None`, for a verifier that only a malicious answer makes hang: an answer over
  which it is killed gets this verdict and the score 0. Without one, a verifier that hangs is an error;
- `check()`, a method or None, that finds what is wrong with its arguments where that may take long: it
  runs in such a process, before anything is scored, and raises `ConfigError`;
- `preload: tuple[str, ...]`, modules that are imported once, before processes are forked."""


@runtime_checkable
class AsyncReward(Protocol):
    """A reward that awaits others: a sandbox, a reward model. It runs on the event loop."""

    async def score(self, answer: Answer, services: SharedServices) -> float | RewardResult:
        """Return the score of one answer.

        Raises:
            RewardOutage: somebody it needs failed; it is called again.
        """


Reward = RewardFunction | AsyncReward

REWARDS: Registry[Callable[..., Any]] = Registry(
    "reward",
    {
        "code": "gateway.rewards.code:CodeReward",
        "exact": "gateway.rewards.exact:ExactMatch",
        "format": "gateway.rewards.format:make_format",
        "given": "gateway.rewards.given:Given",
        "gsm8k": "gateway.rewards.gsm8k:GSM8K",
        "math": "gateway.rewards.math:Math",
        "none": "gateway.rewards.unscored:Unscored",
        "reward_model": "gateway.rewards.reward_model:RewardModel",
    },
    entry_point_group="headway.rewards",
)


def register_reward(name: str, target: str | Callable[..., Any]) -> None:
    """Add a reward; requests then name it, and nothing else that they carry is ever imported.

    Args:
        name: what a request writes.
        target: a class or factory of rewards, a plain function in one of the signatures that
            `signatures` knows, or `"module:attribute"` for a lazy one. It must be importable by
            its name: it runs in other processes.
    Raises:
        ConfigError: the name is taken, or the function has another signature.
    """
    from gateway.rewards.functions import as_factory  # it builds on this module

    if not isinstance(target, str):
        as_factory(target)
    REWARDS.register(name, target)


def make_reward(name: str, args: Mapping[str, Any]) -> Reward:
    """Build a reward with its arguments.

    Raises:
        UnknownName: nobody registered the name.
        ConfigError: the arguments do not fit, or what was registered makes no reward.
    """
    from gateway.rewards.functions import build_reward  # it builds on this module

    return build_reward(reward_factory(name), name, args)


def reward_factory(name: str) -> Callable[..., Reward]:
    """Return the factory of the reward of this name."""
    from gateway.rewards.functions import as_factory

    return as_factory(REWARDS.get(name))


def reward_schema(name: str) -> dict[str, Any]:
    """JSON schema of a reward's arguments."""
    return args_model(reward_factory(name)).model_json_schema()


def reward_raised(name: str, error: BaseException) -> RewardError:
    """Return the error of a reward that raised, with the user's part of its traceback."""
    said = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
    return RewardError(f"reward {name!r} raised {said}\n{user_frames(error)}")


def as_result(name: str, returned: Any) -> RewardResult:
    """Check what a reward returned; details become what JSON can carry.

    Raises:
        RewardError: it is no finite number and no result with one, or has too many details.
    """
    result = returned if isinstance(returned, RewardResult) else RewardResult(returned)
    if not isinstance(result.score, Real):
        raise RewardError(
            f"reward {name!r} returned {type(result.score).__name__}; a number or RewardResult is wanted"
        )
    score = float(result.score)
    if not abs(score) <= MAX_REWARD:
        raise RewardError(
            f"reward {name!r} returned {score}; a number that is finite as float32 is wanted"
        )
    if result.verdict not in VERDICTS:
        raise RewardError(
            f"reward {name!r} returned the verdict {result.verdict!r}; known: {', '.join(VERDICTS)}"
        )
    if not result.details:
        return RewardResult(score, {}, result.verdict)
    text = json.dumps(result.details, default=str, skipkeys=True)
    if len(text) > MAX_DETAILS_CHARS:
        raise RewardError(
            f"reward {name!r} returned details of {len(text)} characters of JSON; at most "
            f"{MAX_DETAILS_CHARS} are stored"
        )
    return RewardResult(score, json.loads(text, parse_constant=str), result.verdict)
