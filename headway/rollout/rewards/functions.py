"""Plain functions as rewards, in the signatures that this field knows.

| first parameters | as in |
|---|---|
| `(answer)` | here |
| `(answer, facilities)`, `async` | here |
| `(prompt, completions, prompt_ids, completion_ids, **data)` | AReaL |
| `(data_source, solution_str, ground_truth, extra_info)` | verl |

Which one it is, the parameters' names tell; any other function is a factory of rewards. Of AReaL's, the
row fills every parameter; of the others, further parameters are arguments that are given where the reward
is named. `async` functions run on the event loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from headway.contracts.errors import DataError
from headway.contracts.types import RewardResult
from headway.rollout.facilities import Facilities
from headway.rollout.parts import signature_of
from headway.rollout.rewards.base import Answer, Reward

Fields = Callable[[Answer], dict[str, Any]]
"""What an answer fills of a function's parameters."""


@lru_cache(maxsize=256)
def as_factory(target: Callable[..., Any]) -> Callable[..., Reward]:
    """A factory of rewards: the target itself, or one that wraps a plain function."""
    if not inspect.isfunction(target):
        return target
    names = tuple(signature_of(target).parameters)
    fields = next((read for first, read in _SIGNATURES if names[: len(first)] == first), None)
    return target if fields is None else FunctionFactory(target, fields)


class FunctionFactory:
    """Makes a reward of a function with arguments for the parameters that no answer fills."""

    def __init__(self, function: Callable[..., Any], fields: Fields) -> None:
        self._function = function
        self._fields = fields
        self.__doc__ = function.__doc__
        self.__signature__ = _rest_of(function, fields)

    def __call__(self, **args: Any) -> Reward:
        call = FunctionCall(self._function, self._fields, args)
        is_async = inspect.iscoroutinefunction(self._function)
        return AsyncFunctionReward(call) if is_async else FunctionReward(call)

    def __reduce__(self) -> tuple[Any, ...]:
        return as_factory, (self._function,)


class FunctionCall:
    """A function, and how an answer becomes its arguments."""

    def __init__(self, function: Callable[..., Any], fields: Fields, args: dict[str, Any]) -> None:
        parameters = signature_of(function).parameters
        self._function = function
        self._fields = fields
        self._args = args
        self._names = frozenset(parameters)
        self._is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def __call__(self, answer: Answer, **more: Any) -> Any:
        given = {**self._fields(answer), **self._args, **more}
        if not self._is_open:
            given = {name: value for name, value in given.items() if name in self._names}
        return self._function(**given)


class FunctionReward:
    """A plain function with its arguments."""

    def __init__(self, call: FunctionCall) -> None:
        self._call = call

    def __call__(self, answer: Answer) -> Any:
        return _as_reward(self._call(answer))


class AsyncFunctionReward:
    """`AsyncReward`: an `async` function with its arguments."""

    def __init__(self, call: FunctionCall) -> None:
        self._call = call

    async def judge(self, answer: Answer, facilities: Facilities) -> Any:
        return _as_reward(await self._call(answer, facilities=facilities))


def _answer_fields(answer: Answer) -> dict[str, Any]:
    return {"answer": answer}


def _areal_fields(answer: Answer) -> dict[str, Any]:
    return {
        **answer.data,
        "prompt": answer.prompt,
        "completions": answer.completion,
        "prompt_ids": list(answer.prompt_ids),
        "completion_ids": list(answer.completion_ids),
    }


def _verl_fields(answer: Answer) -> dict[str, Any]:
    data = answer.data
    judged = data.get("reward_model")
    holder = judged if isinstance(judged, Mapping) and "ground_truth" in judged else data
    key = "ground_truth" if "ground_truth" in holder else "answer"
    if key not in holder:
        raise DataError(
            "the row has no reward_model.ground_truth, ground_truth or answer; "
            f"it has {sorted(data)}"
        )
    return {
        "data_source": data.get("data_source", ""),
        "solution_str": answer.completion,
        "ground_truth": holder[key],
        "extra_info": data.get("extra_info") or {},
    }


_SIGNATURES: tuple[tuple[tuple[str, ...], Fields], ...] = (
    (("prompt", "completions", "prompt_ids", "completion_ids"), _areal_fields),
    (("data_source", "solution_str", "ground_truth"), _verl_fields),
    (("answer",), _answer_fields),
)


def _rest_of(function: Callable[..., Any], fields: Fields) -> inspect.Signature:
    """The parameters that are given where the reward is named."""
    signature = signature_of(function)
    if fields is _areal_fields:
        return signature.replace(parameters=[])
    filled = {"data_source", "solution_str", "ground_truth", "extra_info", "answer", "facilities"}
    rest = [p for name, p in signature.parameters.items() if name not in filled]
    return signature.replace(parameters=rest)


def _as_reward(returned: Any) -> Any:
    """A mapping with `score` is verl's way of telling more."""
    if isinstance(returned, Mapping) and "score" in returned:
        details = {name: value for name, value in returned.items() if name != "score"}
        return RewardResult(returned["score"], details)
    return returned
