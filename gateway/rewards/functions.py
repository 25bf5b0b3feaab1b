"""Plain functions as rewards, in the signatures that this field knows (`signatures`).

The parameters' names show which one it is. A function with other parameters makes rewards, as a class
does, unless it can be seen to be a reward: then it is refused. `async` functions run on the event loop.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from gateway.components.arguments import build_component, signature_of
from gateway.components.shared_services import SharedServices
from gateway.rewards.base import Answer, AsyncReward, Reward
from gateway.rewards.signatures import (
    Convention,
    arguments_of,
    check_function,
    convention_of,
    known_signatures,
    required_of,
)
from headway.contracts.errors import ConfigError, DataError


@lru_cache(maxsize=256)
def as_factory(target: Callable[..., Any]) -> Callable[..., Reward]:
    """A factory of rewards: the target itself, or one that wraps a plain function.

    Raises:
        ConfigError: it is a reward function in no signature that is known, or an object.
    """
    if isinstance(target, type):
        return target
    if not callable(target):
        raise ConfigError(f"{target!r} cannot be called; register its class, or a function")
    signature = signature_of(target)
    if not is_function(target):
        if convention_of(signature) is not None:
            raise ConfigError(f"{target!r} is an object; register its class, or a function")
        return target
    check_function(_name_of(target), signature, inspect.iscoroutinefunction(target))
    convention = convention_of(signature)
    return target if convention is None else FunctionFactory(target, signature, convention)


def build_reward(factory: Callable[..., Reward], name: str, args: Mapping[str, Any]) -> Reward:
    """Make a reward of what `as_factory` returned.

    Raises:
        ConfigError: the arguments do not fit, or what was made is no reward.
    """
    try:
        reward = build_component(factory, "reward", name, args)
    except ConfigError as error:
        if is_function(factory) and required_of(signature_of(factory)) - args.keys():
            raise ConfigError(f"{error.message}; {_if_reward(factory)}") from error
        raise
    if not callable(reward) and not isinstance(reward, AsyncReward):
        made = f"{_name_of(factory)} made {type(reward).__name__}, which is no reward"
        raise ConfigError(f"reward {name!r}: {made}; {_if_reward(factory)}")
    return reward


def is_function(target: Callable[..., Any]) -> bool:
    """Not a class, nor an object that can be called."""
    return inspect.isfunction(target) or inspect.ismethod(target) or isinstance(target, partial)


class FunctionFactory:
    """Makes a reward of a function with arguments for the parameters that no answer fills."""

    def __init__(
        self, function: Callable[..., Any], signature: inspect.Signature, convention: Convention
    ) -> None:
        self._function = function
        self._signature = signature
        self._convention = convention
        self.__doc__ = function.__doc__
        self.__signature__ = arguments_of(signature)

    def __call__(self, **args: Any) -> Reward:
        call = FunctionCall(self._function, self._signature, self._convention, args)
        is_async = inspect.iscoroutinefunction(self._function)
        return AsyncFunctionReward(call) if is_async else FunctionReward(call)

    def __reduce__(self) -> tuple[Any, ...]:
        return as_factory, (self._function,)


class FunctionCall:
    """A function, how an answer becomes its arguments, and what it returns a score."""

    def __init__(
        self,
        function: Callable[..., Any],
        signature: inspect.Signature,
        convention: Convention,
        args: dict[str, Any],
    ) -> None:
        self._function = function
        self._name = _name_of(function)
        self._signature = signature
        self._convention = convention
        self._args = args
        self._required = required_of(signature)
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        self._named = [
            name
            for name, kind in kinds.items()
            if kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        ]
        self._open = next(
            (name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD), None
        )

    def __call__(self, answer: Answer, **offered: Any) -> Any:
        """Call the function; `offered` reaches it if it has parameters of these names.

        Raises:
            DataError: the row lacks what the function wants.
        """
        given = self._convention.fields(answer) | self._args
        given |= {name: value for name, value in offered.items() if name in self._named}
        if missing := sorted(self._required - given.keys()):
            raise DataError(
                f"the row has no {', '.join(missing)}, which the reward function {self._name} "
                f"takes; it has {sorted(answer.data)}"
            )
        bound = OrderedDict((name, given.pop(name)) for name in self._named if name in given)
        if self._open is not None:
            bound[self._open] = given
        arguments = inspect.BoundArguments(self._signature, bound)
        return self._function(*arguments.args, **arguments.kwargs)

    def result(self, returned: Any) -> Any:
        """Convert what the function returned to a result."""
        return self._convention.result(self._name, returned)


class FunctionReward:
    """A plain function with its arguments."""

    def __init__(self, call: FunctionCall) -> None:
        self._call = call

    def __call__(self, answer: Answer) -> Any:
        return self._call.result(self._call(answer))


class AsyncFunctionReward:
    """`AsyncReward`: an `async` function with its arguments."""

    def __init__(self, call: FunctionCall) -> None:
        self._call = call

    async def score(self, answer: Answer, services: SharedServices) -> Any:
        return self._call.result(await self._call(answer, services=services))


def _name_of(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, partial) else function
    return getattr(inner, "__name__", repr(inner))


def _if_reward(factory: Callable[..., Any]) -> str:
    return f"if {_name_of(factory)} is the reward itself: {known_signatures()}"
