"""Calls run as soon as they can, beside one another, and see what they declared."""

from __future__ import annotations

import json
import signal
import threading

import pytest
import torch

from trainer.batching.sequences import SequenceBatch
from trainer.dataflow.call import Call
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.runner import CallResult, DataflowRunner, StepInfo
from trainer.dataflow.trace import Trace

TOKENS = torch.arange(5)
BATCH = SequenceBatch((2, 3), {"tokens": TOKENS, "hidden": TOKENS})
DEADLINE_S = 30.0
CPU = torch.device("cpu")
GEN = Call("gen", "generate", "rollout", (), ("tokens", "hidden"))
ONE = Call("one", "inference", "x", ("tokens",), ("first",), "a")
TWO = Call("two", "inference", "x", ("tokens",), ("second",), "b")
SUM = Call("sum", "compute", "y", ("first", "second"), ("total",))
CALLS = (GEN, ONE, TWO, SUM)


def plus(column: str, name: str, number: int):
    return lambda batch, _: CallResult({name: batch[column] + number}, {name: float(number)})


def add(batch, info):
    return CallResult({"total": batch["first"] + batch["second"]}, {"step": float(info.step)})


FUNCTIONS = {"one": plus("tokens", "first", 1), "two": plus("tokens", "second", 2), "sum": add}


def run(functions, max_parallel=4, calls=CALLS, trace=None):
    runner = DataflowRunner(Dataflow(calls), functions, max_parallel, CPU, trace or Trace(None, 0))
    return runner.run(BATCH, StepInfo(step=7))


@pytest.mark.parametrize("max_parallel", [1, 2, 4])
def test_all_columns_and_figures_come_together(max_parallel):
    batch, metrics = run(FUNCTIONS, max_parallel)
    assert torch.equal(batch["total"], 2 * TOKENS + 3)
    assert metrics == {"first": 1.0, "second": 2.0, "step": 7.0}


def test_calls_that_need_nothing_of_one_another_overlap(tmp_path):
    """Each waits within its call until the other has begun; the trace shows it."""
    meeting = threading.Barrier(2)

    def meet(column, name, number):
        def call(batch, info):
            meeting.wait(DEADLINE_S)
            return plus(column, name, number)(batch, info)

        return call

    functions = {"one": meet("tokens", "first", 1), "two": meet("tokens", "second", 2), "sum": add}
    trace = Trace(tmp_path / "trace.json", 1)
    run(functions, trace=trace)
    trace.end_step()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events}
    assert max(spans["one"][0], spans["two"][0]) < min(spans["one"][1], spans["two"][1])
    assert spans["sum"][0] >= max(spans["one"][1], spans["two"][1])
    assert len({event["tid"] for event in events if event["name"] != "sum"}) == 2
    assert all(event["args"]["step"] == 7 for event in events)


def test_a_lone_call_runs_in_the_thread_of_its_caller():
    threads = []

    def note(batch, info):
        threads.append(threading.current_thread())
        return add(batch, info)

    run(FUNCTIONS | {"sum": note})
    assert threads == [threading.current_thread()]


def test_calls_on_one_model_never_overlap():
    inside = threading.Semaphore(1)

    def alone(column, name, number):
        def call(batch, info):
            assert inside.acquire(blocking=False)
            try:
                return plus(column, name, number)(batch, info)
            finally:
                inside.release()

        return call

    same = Call("two", "inference", "x", ("tokens",), ("second",), "a")
    functions = {
        "one": alone("tokens", "first", 1),
        "two": alone("tokens", "second", 2),
        "sum": add,
    }
    for _ in range(20):
        run(functions, calls=(GEN, ONE, same, SUM))


def test_a_call_sees_what_it_declared_and_nothing_else():
    def look(batch, info):
        assert set(batch.columns) == {"tokens"}
        return CallResult({"first": batch["tokens"]}, {})

    run(FUNCTIONS | {"one": look})


@pytest.mark.parametrize("max_parallel", [1, 4])
def test_a_call_adds_what_it_declared(max_parallel):
    wrong = {"one": lambda batch, _: CallResult({"frist": TOKENS}, {})}
    with pytest.raises(ValueError, match=r"'one' output \['frist'\].*\['first'\]"):
        run(FUNCTIONS | wrong, max_parallel)


@pytest.mark.parametrize("max_parallel", [1, 4])
def test_what_a_call_raises_comes_out_and_nothing_after_it_begins(max_parallel):
    begun = []

    def fail(batch, info):
        raise RuntimeError("no such weights")

    functions = FUNCTIONS | {"one": fail, "sum": lambda batch, _: begun.append(1)}
    with pytest.raises(RuntimeError, match="no such weights"):
        run(functions, max_parallel)
    assert not begun


def test_who_is_told_to_end_waits_for_no_call():
    def interrupt(signum, frame):
        raise KeyboardInterrupt

    over = threading.Event()

    def hang(batch, info):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        over.wait(DEADLINE_S)
        return plus("tokens", "first", 1)(batch, info)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(FUNCTIONS | {"one": hang})
        assert not over.is_set()
    finally:
        signal.signal(signal.SIGUSR1, before)
        over.set()
