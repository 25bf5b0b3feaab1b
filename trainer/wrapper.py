"""Train engines around another train engine: what they do not change is forwarded."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from trainer.api import TrainEngine

EngineT = TypeVar("EngineT", bound=TrainEngine)
ArgsT = ParamSpec("ArgsT")
ResultT = TypeVar("ResultT")


def forwarded(
    method: Callable[Concatenate[Any, ArgsT], ResultT],
) -> Callable[Concatenate[Any, ArgsT], ResultT]:
    """A method of an `EngineWrapper` that calls the same one of the engine inside."""
    name = method.__name__

    @wraps(method)
    def call(wrapper: Any, /, *args: ArgsT.args, **kwargs: ArgsT.kwargs) -> ResultT:
        wrapper.before(name)
        result: ResultT = getattr(wrapper.train_engine, name)(*args, **kwargs)
        return result

    return call


class EngineWrapper(Generic[EngineT]):
    """A `TrainEngine` that forwards every call; subclasses override what they change."""

    def __init__(self, train_engine: EngineT) -> None:
        self.train_engine = train_engine

    def before(self, call: str) -> None:
        """Called with the name of a method before it is forwarded; raise to refuse the call."""

    initialize = forwarded(TrainEngine.initialize)
    get_scheduling_config = forwarded(TrainEngine.get_scheduling_config)
    train_batch = forwarded(TrainEngine.train_batch)
    eval_batch = forwarded(TrainEngine.eval_batch)
    forward = forwarded(TrainEngine.forward)
    without_adapters = forwarded(TrainEngine.without_adapters)
    upload_weights = forwarded(TrainEngine.upload_weights)
    step_lr_scheduler = forwarded(TrainEngine.step_lr_scheduler)
    save = forwarded(TrainEngine.save)
    load = forwarded(TrainEngine.load)
    destroy = forwarded(TrainEngine.destroy)

    def move_towards(self, source: TrainEngine, eta: float) -> None:
        """See `TrainEngine`; a wrapped source is unwrapped."""
        self.before("move_towards")
        while isinstance(source, EngineWrapper):
            source = source.train_engine
        self.train_engine.move_towards(source, eta)
