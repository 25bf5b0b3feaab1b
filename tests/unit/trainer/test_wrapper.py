"""`EngineWrapper`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from trainer.api import TrainEngine
from trainer.wrapper import EngineWrapper

METHODS = [
    name for name, _ in inspect.getmembers(TrainEngine, inspect.isfunction) if name[0] != "_"
]


class Recorder:
    """An engine that notes each call, and answers with its name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> str:
            self.calls.append((name, args, kwargs))
            return f"answer of {name}"

        return call


class Refusing(EngineWrapper[Any]):
    def before(self, call: str) -> None:
        raise RuntimeError(f"not {call}")


@pytest.mark.parametrize("name", [name for name in METHODS if name != "move_towards"])
def test_every_call_is_forwarded_with_its_arguments(name):
    engine = Recorder()
    answer = getattr(EngineWrapper(engine), name)("first", other="second")
    assert answer == f"answer of {name}"
    assert engine.calls == [(name, ("first",), {"other": "second"})]


@pytest.mark.parametrize("name", METHODS)
def test_signature_and_description_are_those_of_the_protocol(name):
    ours, theirs = getattr(EngineWrapper, name), getattr(TrainEngine, name)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert ours.__doc__


@pytest.mark.parametrize("name", METHODS)
def test_a_refused_call_does_not_reach_the_engine(name):
    engine = Recorder()
    args = (None, 0.5) if name == "move_towards" else ()
    with pytest.raises(RuntimeError, match=f"not {name}"):
        getattr(Refusing(engine), name)(*args)
    assert engine.calls == []


def test_an_engine_moves_towards_what_the_other_wrapper_holds():
    engine, source = Recorder(), Recorder()
    EngineWrapper(engine).move_towards(EngineWrapper(EngineWrapper(source)), 0.5)
    assert engine.calls == [("move_towards", (source, 0.5), {})]
