"""The engine's thread: one step after the other, with what callers order in between.

The thread owns the model, the KV cache and all sequences. Between two steps it takes orders (new
sequences, aborts, pauses, swaps); then one forward computes what the scheduler chose and samples a
token for every sequence that has nothing pending. Results go back with `call_soon_threadsafe`, once
per step and event loop. The version is read and changed on this thread only, which is why the version
of a token is the one that sampled it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.errors import BackendError, DataError, ServiceError
from headway.contracts.http.generation import PauseMode
from headway.contracts.types import LLMResponse, PolicyVersion
from inference_server.backends.base import Load
from inference_server.backends.embedded.adapter_bank import LoadedAdapter
from inference_server.backends.embedded.decoder import Decoder, InFlightStep, Refused
from inference_server.backends.embedded.model import EmbeddedModel
from inference_server.backends.embedded.orders import Orders
from inference_server.backends.embedded.output_queue import News, OutputQueue
from inference_server.backends.embedded.scheduler import ScheduledTokens, Scheduler, no_memory
from inference_server.backends.embedded.sequence import Sequence
from inference_server.backends.embedded.step_outputs import SampledToken
from inference_server.backends.embedded.swaps import Swap
from weight_sync.manifest import Adapter

log = logging.getLogger(__name__)

T = TypeVar("T")


class DecodeLoop:
    """Steps of one model on a thread of its own."""

    def __init__(
        self,
        config: EmbeddedTorchConfig,
        model: EmbeddedModel,
        version: PolicyVersion,
        is_asleep: bool,
    ) -> None:
        self._model = model
        self.version = version
        self.cache, runner = model.make_runner(config)
        self.decoder = Decoder(runner, model.limits, model.device, model.recorder)
        self.scheduler = Scheduler(self.cache, config.max_sequences, config.max_prefill_tokens)
        self._orders = Orders()
        self._swaps: deque[Swap] = deque()
        self._in_flight: InFlightStep | None = None
        """The step that was launched and is not read yet."""
        self._output_queue = OutputQueue()
        self.is_paused = False
        self.is_asleep = is_asleep
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._started = time.monotonic()
        self._busy_s = 0.0
        self._num_generated = 0
        self._num_prefilled = 0

    # For any thread.

    def start(self) -> None:
        """Start the thread."""
        self._started = time.monotonic()
        self._thread.start()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the engine's thread, between two steps."""
        done: Future[T] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except ServiceError as error:  # the caller's own mistake; the engine goes on
                    done.set_exception(error)
                except Exception as error:
                    done.set_exception(error)
                    raise

        if not self._thread.is_alive() and not self._orders.is_closed:
            run()  # not started yet: there is no other thread
        else:
            self._orders.put(run)
        return done

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._orders.put(lambda: self._admit(sequence))

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence that nobody waits for any more."""
        sequence.is_cancelled = True
        self._orders.nudge()

    async def swap(self, swap: Swap) -> int:
        """Carry out a swap between two steps; return the number of sequences that had started."""
        self._orders.put(lambda: self._swaps.append(swap))
        try:
            return await asyncio.wrap_future(swap.done)
        finally:
            self._orders.nudge()  # if the caller gave up, the engine must stop draining for it

    def load(self) -> Load:
        """How busy it is now."""
        scheduler, cache = self.scheduler, self.cache
        return Load(
            running=len(scheduler.running),
            queued=len(scheduler.waiting),
            generated_tokens=self._num_generated,
            busy_s=self._busy_s,
            uptime_s=time.monotonic() - self._started,
            prefill_tokens=self._num_prefilled,
            kv_tokens=sum(s.computed for s in list(scheduler.running)),
            kv_capacity_tokens=cache.budget_tokens,
            kv_usage=min(1.0, scheduler.reserved_tokens / cache.budget_tokens),
            preemptions=scheduler.num_preemptions,
            max_running=scheduler.max_sequences,
        )

    async def aclose(self) -> None:
        """End the thread and what runs on it."""
        self._orders.close()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        else:
            self._fail_all("the backend was closed")

    # For the engine's thread, by `call`.

    def pause(self, mode: PauseMode) -> None:
        """Stand still; what becomes of the requests is the mode's."""
        self.is_paused = True
        if mode == "abort":
            self.interrupt(None)
        elif mode == "retract":
            self.scheduler.retract()

    def resume(self) -> None:
        """Go on after a pause."""
        self.is_paused = False

    def flush(self) -> bool:
        """Drop keys and values of ended requests; false while there are running ones."""
        if self.scheduler.running:
            return False
        self.cache.drop_kept()
        return True

    def wake(
        self, version: PolicyVersion, weights: Mapping[str, Tensor], adapter: Adapter | None
    ) -> None:
        """See `EmbeddedTorchBackend.take_weights`."""
        try:
            self._model.fill(weights, adapter)
            self._model.probe(self.cache)
        except Exception as error:
            self._model.drop_weights()
            self.cache.clear()
            if isinstance(error, ServiceError):
                raise
            raise BackendError(f"the model does not run on these weights: {error}") from error
        self.version = version
        self.is_asleep = False

    def sleep(self) -> None:
        """See `EmbeddedTorchBackend.drop_weights`."""
        self.is_asleep = True
        self.interrupt(None)
        self.decoder.forget()
        self._model.drop_weights()
        self.cache.clear()

    def put_adapter(self, name: str, adapter: LoadedAdapter) -> None:
        """Serve a version of an adapter; what runs with it goes on over its keys and values."""
        self.cache.invalidate_adapter(name)
        self._model.adapters.put(name, adapter)

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter; what runs with it ends with the tokens so far.

        Raises:
            DataError: it is not loaded.
        """
        self._model.adapters.version(name)
        for sequence in self.scheduler.sequences:
            if sequence.adapter == name:
                self._answer_early(sequence)
        self.cache.invalidate_adapter(name)
        self._model.adapters.drop(name)

    def interrupt(self, rid: str | None) -> None:
        """End a request, or all of them, with the tokens so far."""
        for sequence in self.scheduler.sequences:
            if rid is None or sequence.request.rid == rid:
                self._answer_early(sequence)

    def step(self) -> None:
        """Launch the next step, and hand out what the last one gave."""
        sequences = self.scheduler.sequences
        if self._swaps or any(sequence.is_cancelled for sequence in sequences):
            self._land()
        if self._in_flight is None:
            for sequence in self.scheduler.sequences:
                if sequence.is_cancelled:
                    self.scheduler.finish(sequence)
            self._swap_if_due()
            scheduled = [] if self._is_still else self.scheduler.schedule()
            self._in_flight = self._launch(scheduled, self.decoder.launch) if scheduled else None
        self._land(self._launch_behind())
        self._refuse()
        self._output_queue.deliver()

    def end(self, sequence: Sequence, response: LLMResponse) -> None:
        """Answer a sequence and give back what it holds."""
        self.scheduler.finish(sequence)
        self._tell(sequence, response)

    # On that thread only.

    def _run(self) -> None:
        reason = "the backend was closed"
        with self._model.device.decoding():
            try:
                while self._take_orders():
                    before = time.monotonic()
                    self.step()
                    self._busy_s += time.monotonic() - before
            except Exception as error:
                log.exception("the engine thread died")
                reason = f"the engine died: {type(error).__name__}: {error}"
                self.failure = reason
            finally:
                self._fail_all(reason)

    def _take_orders(self) -> bool:
        """Sleep until there is something to do; false when closing."""
        while True:
            is_closing = self._orders.wait(self._is_due)
            if self._orders:
                self._land()
            self._orders.carry_out()
            self._output_queue.deliver()
            if is_closing:
                return False
            if self._is_due():
                return True

    def _is_due(self) -> bool:
        if self._in_flight is not None or any(s.is_cancelled for s in self.scheduler.sequences):
            return True
        return bool(self._swaps) or (not self._is_still and self.scheduler.has_work)

    @property
    def _is_still(self) -> bool:
        return self.is_paused or self.is_asleep

    def _launch(
        self,
        scheduled: list[ScheduledTokens],
        launch: Callable[[list[ScheduledTokens]], InFlightStep],
    ) -> InFlightStep | None:
        """One forward over the tokens of a step; None where there was no memory for it."""
        try:
            return launch(scheduled)
        except torch.OutOfMemoryError as error:
            log.warning("a step of %d sequences found no memory: %s", len(scheduled), error)
            for work in scheduled:
                self.cache.truncate(work.span.row, work.span.start, work.span.end)
            self.decoder.forget()
            if self._in_flight is None:
                self.scheduler.make_room()
            return None

    def _launch_behind(self) -> InFlightStep | None:
        """The step behind the one that is under way, if it is sure what that will be."""
        in_flight = self._in_flight
        in_order = self._model.device.is_host or self._model.recorder.is_used
        if in_flight is None or in_order or not in_flight.can_be_followed:
            return None
        scheduled = self.scheduler.follow(in_flight.scheduled)
        if scheduled is None:
            return None
        return self._launch(scheduled, lambda tokens: self.decoder.launch_behind(in_flight, tokens))

    def _land(self, following: InFlightStep | None = None) -> None:
        """Wait for the step that is under way, if there is one; ends what is finished."""
        in_flight, self._in_flight = self._in_flight, following
        if in_flight is None:
            return
        for work in in_flight.scheduled:
            count = work.span.end - work.span.start - len(work.guess)
            if count > 1 or not work.sequence.num_output:
                self._num_prefilled += count
        outcomes = self.decoder.land(in_flight)
        self._keep_right_guesses(in_flight, outcomes)
        now = time.monotonic()
        for outcome in outcomes:
            # None if it ended while the step was under way, or with a token before this one.
            if outcome.sequence.row is not None:
                self._take(outcome, now)

    def _keep_right_guesses(
        self, in_flight: InFlightStep, outcomes: list[SampledToken | Refused]
    ) -> None:
        """Before any row moves: its tokens move with it, and behind them there are zeros."""
        for outcome in outcomes:
            row = outcome.sequence.row
            if row is not None and isinstance(outcome, SampledToken) and outcome.place:
                row.length += 1
        for work in in_flight.scheduled:
            row = work.sequence.row
            if work.guess and row is work.span.row:
                self.cache.truncate(row, row.length, work.span.end)

    def _admit(self, sequence: Sequence) -> None:
        try:
            if sequence.adapter:  # it may have been unloaded since the request was checked
                self._model.adapters.version(sequence.adapter)
        except DataError as error:
            self._tell(sequence, error)
        else:
            self.scheduler.waiting.append(sequence)

    def _swap_if_due(self) -> None:
        while self._swaps:
            swap = self._swaps[0]
            if swap.done.cancelled():
                self._swaps.popleft()
                continue
            is_held = any(s.has_started for s in self.scheduler.sequences) and not self.is_paused
            if swap.policy == "drain" and is_held:
                self.scheduler.is_draining = True
                return
            self._apply(swap)
            self._swaps.popleft()  # only now: if the engine dies in it, the caller gets the error
        self.scheduler.is_draining = False

    def _apply(self, swap: Swap) -> None:
        if not swap.done.set_running_or_notify_cancel():
            return  # the caller gave up before the swap began
        running = len([s for s in self.scheduler.sequences if s.has_started])
        if swap.policy == "abort":
            for sequence in self.scheduler.sequences:
                if sequence.has_started:
                    self._answer_early(sequence)
        elif swap.policy == "recompute":
            self.scheduler.retract()
        swap.replaced = self._model.exchange(swap.staged)
        self.cache.invalidate()
        self.version = swap.staged.version
        swap.done.set_result(running)

    def _answer_early(self, sequence: Sequence) -> None:
        self.end(sequence, sequence.response("interrupt", None, time.monotonic()))

    def _take(self, outcome: SampledToken | Refused, now: float) -> None:
        """Record what a step gave one sequence, and end it if it is finished."""
        sequence = outcome.sequence
        if isinstance(outcome, Refused):
            self.scheduler.discard(sequence)
            self._tell(sequence, outcome.error)
        elif not math.isfinite(outcome.logprob):
            self.scheduler.discard(sequence)
            self.decoder.forget()
            served = f"version {self._version_of(sequence)}"
            if sequence.adapter:
                served += f" of {sequence.adapter}"
            reason = f"request {sequence.request.rid}: {served} gave logits that are not finite"
            self._tell(sequence, BackendError(reason))
        elif sequence.request.gconfig.max_new_tokens == 0:
            self.end(sequence, sequence.response("length", None, now))
        else:
            self._num_generated += 1
            self._record(outcome, now)

    def _version_of(self, sequence: Sequence) -> PolicyVersion:
        """That of what samples now."""
        adapters = self._model.adapters
        return adapters.version(sequence.adapter) if sequence.adapter else self.version

    def _record(self, sampled: SampledToken, now: float) -> None:
        sequence = sampled.sequence
        version = self._version_of(sequence)
        try:
            sequence.append(sampled.token, sampled.logprob, version, sampled.top, now, sampled.left)
        except DataError as error:
            self.scheduler.discard(sequence)
            self._tell(sequence, error)
            return
        if sequence.caller.on_delta is not None:
            self._tell(sequence, sampled.delta(version))
        ended = sequence.end()
        if ended is not None:
            self.end(sequence, sequence.response(*ended, now))

    def _refuse(self) -> None:
        """Answer sequences that there is no memory for."""
        refused, self.scheduler.refused = self.scheduler.refused, []
        for sequence in refused:
            self._tell(sequence, no_memory(sequence))

    def _tell(self, sequence: Sequence, news: News) -> None:
        self._output_queue.put(sequence.caller, news)

    def _fail_all(self, reason: str) -> None:
        for order in self._orders.take_rest(self.failure):
            with suppress(Exception):  # its caller knows; most hand over work, which fails below
                order()
        self._in_flight = None
        sequences = self.scheduler.sequences
        self.scheduler.clear()
        for sequence in sequences:
            self._tell(sequence, BackendError(reason))
        self._output_queue.deliver()
        for swap in self._swaps:
            with suppress(InvalidStateError):  # its caller gave up
                swap.done.set_exception(BackendError(reason))
