"""Runs the calls of a dataflow: each as soon as all that it reads is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from headway.contracts.types import PolicyVersion
from trainer.batching.sequences import SequenceBatch
from trainer.dataflow.call import Call
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.trace import Trace
from trainer.interfaces.base import Columns, Figures


@dataclass(frozen=True, slots=True)
class Moment:
    """Where the run stands while a batch is worked on."""

    step: int = 0
    """Counts from 0."""
    version: PolicyVersion = 0
    """Of the weights that the step starts from."""


@dataclass(frozen=True, slots=True)
class Said:
    """What came of a call."""

    columns: Columns
    figures: Figures


Function = Callable[[SequenceBatch, Moment], Said]
"""`(the columns that the call reads, moment) -> what it adds`."""


def function_of(call: Call, interface: Any) -> Function:
    """What runs a call: the method of its interface that its kind names."""
    if call.kind == "inference":
        return lambda batch, _: Said(interface.inference(batch), {})
    if call.kind == "compute":
        return lambda batch, moment: Said(*interface.compute(batch, moment.version))
    return lambda batch, _: Said({}, interface.train_step(batch))


class Runner:
    """Calls that need nothing of one another run side by side, each in a thread."""

    def __init__(
        self,
        flow: Dataflow,
        functions: Mapping[str, Function],
        max_parallel: int,
        device: torch.device,
        trace: Trace,
    ) -> None:
        """
        Args:
            functions: by the name of the call; a call without one is given by the caller of `run`.
            max_parallel: calls at a time; 1 runs them in the caller's thread.
        """
        self._flow = flow
        self._functions = functions
        self._max_parallel = max_parallel
        self._trace = trace
        self._device = device

    def run(self, batch: SequenceBatch, moment: Moment) -> tuple[SequenceBatch, Figures]:
        """Everything that has a function, on a batch that holds what the others would have said.

        Returns:
            The batch with all columns, and the figures of all calls.
        Raises:
            Whatever a call raised, once those that run beside it are over; no other is begun.
        """
        board = _Board(batch)
        left = [call for call in self._flow.calls if call.name in self._functions]
        done = {call.name for call in self._flow.calls} - {call.name for call in left}
        if self._max_parallel == 1:
            for call in left:
                board.add(call, self._call(call, board.shown(call), moment))
            return board.batch, board.figures
        running: dict[Future[Said], Call] = {}
        try:
            while left or running:
                ready = [call for call in left if self._flow.waits[call.name] <= done]
                for call in ready[: self._max_parallel - len(running)]:
                    left.remove(call)
                    running[self._begin(call, board.shown(call), moment)] = call
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    call = running.pop(future)
                    board.add(call, future.result())
                    done.add(call.name)
        except Exception:
            wait(running)
            raise
        return board.batch, board.figures

    def _begin(self, call: Call, batch: SequenceBatch, moment: Moment) -> Future[Said]:
        """In a thread that nobody waits for when the process is told to end."""
        said: Future[Said] = Future()

        def work() -> None:
            try:
                if self._device.type == "cuda":  # the current one is a matter of each thread
                    torch.cuda.set_device(self._device)
                said.set_result(self._call(call, batch, moment))
            except BaseException as error:  # noqa: BLE001 - the caller's to judge
                said.set_exception(error)

        threading.Thread(target=work, name=call.name, daemon=True).start()
        return said

    def _call(self, call: Call, batch: SequenceBatch, moment: Moment) -> Said:
        details: dict[str, Any] = {"step": moment.step, "version": moment.version}
        with self._trace.span(call.name, call.kind, **details):
            return self._functions[call.name](batch, moment)


class _Board:
    """What has been said so far."""

    def __init__(self, batch: SequenceBatch) -> None:
        self.batch = batch
        self.figures: Figures = {}

    def shown(self, call: Call) -> SequenceBatch:
        """What the call declared to read, and nothing else."""
        columns = {key: self.batch[key] for key in call.input_keys}
        return SequenceBatch(self.batch.lengths, columns)

    def add(self, call: Call, said: Said) -> None:
        """Write down what a call said.

        Raises:
            ValueError: it is not what the call declared.
        """
        if set(said.columns) != set(call.output_keys):
            raise ValueError(
                f"call {call.name!r} output {sorted(said.columns)}, and declares "
                f"{sorted(call.output_keys)}"
            )
        self.batch = self.batch.with_columns(**said.columns)
        self.figures |= said.figures
