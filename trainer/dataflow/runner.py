"""Runner of the calls of a dataflow: each starts as soon as everything that it reads is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from headway.contracts.errors import ConfigError
from headway.contracts.types import PolicyVersion
from trainer.batching.sequences import SequenceBatch
from trainer.dataflow.call import Call
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.trace import Trace
from trainer.interfaces.base import Columns, Metrics
from weight_sync.device import use_device


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Step and version at which a batch is processed."""

    step: int = 0
    """Counts from 0."""
    version: PolicyVersion = 0
    """Version of the weights that the step starts from."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """Columns and metrics that a call returned."""

    columns: Columns
    metrics: Metrics


Function = Callable[[SequenceBatch, StepInfo], CallResult]
"""`(the columns that the call reads, step info) -> its result`."""


def function_of(call: Call, interface: Any) -> Function:
    """Return the function that runs a call: the method of its interface that its kind names.

    Raises:
        ConfigError: the interface has no such method.
    """
    check_method(call, interface)
    if call.kind == "inference":
        return lambda batch, _: CallResult(interface.inference(batch), {})
    if call.kind == "compute":
        return lambda batch, info: CallResult(*interface.compute(batch, info.version))
    return lambda batch, _: CallResult({}, interface.train_step(batch))


def check_method(call: Call, interface: Any) -> None:
    """Refuse an interface that cannot run a call.

    Raises:
        ConfigError: it has no method of the call's kind.
    """
    if not callable(getattr(interface, call.kind, None)):
        raise ConfigError(
            f"call {call.name!r} has the kind {call.kind}, and the interface {call.interface!r} has no "
            "method of this name; give it one, or change the call's kind"
        )


class DataflowRunner:
    """Runs independent calls side by side, each in a thread; a lone one in the caller's thread, whose
    heap keeps the memory that a step frees: another thread's would have to fault it in again.
    """

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

    def run(self, batch: SequenceBatch, info: StepInfo) -> tuple[SequenceBatch, Metrics]:
        """Run every call that has a function, on a batch with the columns of the calls that have none.

        Returns:
            The batch with all columns, and the metrics of all calls.
        Raises:
            Whatever a call raised, once those that run beside it are over; no other is begun.
        """
        state = _StepState(batch)
        left = [call for call in self._flow.calls if call.name in self._functions]
        done = {call.name for call in self._flow.calls} - {call.name for call in left}
        if self._max_parallel == 1:
            for call in left:
                state.add(call, self._call(call, state.shown(call), info))
            return state.batch, state.metrics
        running: dict[Future[CallResult], Call] = {}
        try:
            while left or running:
                ready = [call for call in left if self._flow.waits[call.name] <= done]
                if len(ready) == 1 and not running:
                    (call,) = ready
                    left.remove(call)
                    state.add(call, self._call(call, state.shown(call), info))
                    done.add(call.name)
                    continue
                for call in ready[: self._max_parallel - len(running)]:
                    left.remove(call)
                    running[self._begin(call, state.shown(call), info)] = call
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    call = running.pop(future)
                    state.add(call, future.result())
                    done.add(call.name)
        except Exception:
            wait(running)
            raise
        return state.batch, state.metrics

    def _begin(self, call: Call, batch: SequenceBatch, info: StepInfo) -> Future[CallResult]:
        """Run a call in a daemon thread, which does not keep the process from ending."""
        result: Future[CallResult] = Future()

        def work() -> None:
            try:
                use_device(self._device)
                result.set_result(self._call(call, batch, info))
            except BaseException as error:  # noqa: BLE001 - the caller handles it
                result.set_exception(error)

        threading.Thread(target=work, name=call.name, daemon=True).start()
        return result

    def _call(self, call: Call, batch: SequenceBatch, info: StepInfo) -> CallResult:
        details: dict[str, Any] = {"step": info.step, "version": info.version}
        with self._trace.span(call.name, call.kind, **details):
            return self._functions[call.name](batch, info)


class _StepState:
    """Batch and metrics of a step so far."""

    def __init__(self, batch: SequenceBatch) -> None:
        self.batch = batch
        self.metrics: Metrics = {}

    def shown(self, call: Call) -> SequenceBatch:
        """Return the columns that the call declared to read, and no others; the sampling mask and
        routed experts, too, since they are a part of what a logprob is."""
        columns = {key: self.batch[key] for key in call.input_keys}
        return SequenceBatch(
            self.batch.lengths,
            columns,
            sampling_mask=self.batch.sampling_mask,
            routed_experts=self.batch.routed_experts,
        )

    def add(self, call: Call, result: CallResult) -> None:
        """Add the result of a call.

        Raises:
            ValueError: it is not what the call declared.
        """
        if set(result.columns) != set(call.output_keys):
            raise ValueError(
                f"call {call.name!r} output {sorted(result.columns)}, and declares "
                f"{sorted(call.output_keys)}"
            )
        self.batch = self.batch.with_columns(**result.columns)
        self.metrics |= result.metrics
