"""The embedded torch backend: continuous batching for causal LMs of transformers, on CPU or one GPU.

One engine thread owns the model, the KV cache and all sequences. Between two steps it takes orders
(new sequences, aborts, pauses, swaps) from `_inbox`; then one forward computes what the scheduler
chose and samples a token for every sequence that has nothing pending. Results go back with
`call_soon_threadsafe`, once per step and event loop. The version is read and changed on the engine
thread only, which is why the version of a token is the one that sampled it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import EmbeddedTorchConfig, UpdatePolicy
from headway.contracts.errors import BackendError, DataError, ServiceError, SyncError
from headway.contracts.http.generation import PauseMode
from headway.contracts.types import (
    LLMDelta,
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    WeightUpdateMeta,
)
from headway.rollout.tokenizer import TextTokenizer
from inference_server.backends.base import Limits, Load, OnDelta, Staged, check_request
from inference_server.backends.embedded.model import EmbeddedModel, Fitted
from inference_server.backends.embedded.sampler import (
    Sampled,
    SamplingPlan,
    SamplingRow,
    top_logprobs,
)
from inference_server.backends.embedded.scheduler import Scheduler, Work
from inference_server.backends.embedded.sequence import Caller, Sequence, StopText
from weight_sync.channel import StagedWeights, WeightReader
from weight_sync.manifest import Adapter

log = logging.getLogger(__name__)

T = TypeVar("T")
FREE_BYTES = 16 << 20
FREE_INTERVAL_S = 0.005


@dataclass
class _Swap:
    staged: Fitted
    policy: UpdatePolicy
    done: Future[int] = field(default_factory=Future)
    replaced: list[Tensor] = field(default_factory=list)


class EmbeddedTorchBackend:
    """`GenerationBackend` on this machine's CPU or one GPU."""

    def __init__(
        self,
        config: EmbeddedTorchConfig,
        model: ModelConfig,
        version: PolicyVersion,
        tokenizer: TextTokenizer | None = None,
        is_hollow: bool = False,
    ) -> None:
        """
        Args:
            is_hollow: asleep and without weights, until `wake`.
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._model = EmbeddedModel(model, config.pack_weights, config.max_context, is_hollow)
        self._tokenizer = tokenizer
        self._version = version
        self._cache = self._model.make_cache(config)
        self._scheduler = Scheduler(self._cache, config.max_sequences, config.max_prefill_tokens)
        self._seeds = random.Random(config.seed)
        self._inbox: deque[Callable[[], None]] = deque()
        self._swaps: deque[_Swap] = deque()
        self._outbox: list[tuple[Caller, LLMDelta | LLMResponse | Exception]] = []
        self._plan: tuple[list[Sequence], SamplingPlan] | None = None
        self._wake = threading.Condition()
        self._is_paused = False
        self._is_asleep = is_hollow
        self._is_stopping = False
        self._failure: str | None = None
        self._freeing: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._started = time.monotonic()
        self._busy_s = 0.0
        self._num_generated = 0
        self._num_prefilled = 0

    @property
    def limits(self) -> Limits:
        return self._model.limits

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def num_ranks(self) -> int:
        return 1

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def parameters(self) -> Mapping[str, torch.Size]:
        """Names and shapes that a version must bring."""
        return self._model.parameters

    def read_parameter(self, name: str) -> Tensor:
        """A copy of one parameter, as it is between two steps.

        Raises:
            DataError: the model has no parameter of this name.
        """
        return self._call(lambda: self._model.read(name)).result()

    async def start(self) -> None:
        self._started = time.monotonic()
        self._thread.start()

    async def generate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        check_request(req, self._model.limits)
        loop = asyncio.get_running_loop()
        caller = Caller(loop, loop.create_future(), on_delta)
        sequence = self._sequence(req, caller)
        self._order(lambda: self._scheduler.waiting.append(sequence))
        try:
            return await caller.future
        except BaseException:  # cancelled, or its own `on_delta` raised
            sequence.is_cancelled = True
            self._nudge()
            raise

    async def abort(self, rid: str | None) -> None:
        await asyncio.wrap_future(self._call(lambda: self._interrupt(rid)))

    async def pause(self, mode: PauseMode) -> None:
        def stop() -> None:
            self._is_paused = True
            if mode == "abort":
                self._interrupt(None)
            elif mode == "retract":
                self._scheduler.retract()

        await asyncio.wrap_future(self._call(stop))

    async def resume(self) -> None:
        def go() -> None:
            self._is_paused = False

        await asyncio.wrap_future(self._call(go))

    async def flush(self) -> bool:
        def drop() -> bool:
            if self._scheduler.running:
                return False
            self._cache.drop_kept()
            return True

        return await asyncio.wrap_future(self._call(drop))

    @property
    def expected(self) -> Mapping[str, Tensor]:
        """The parameters that a hollow backend has to be given, on the meta device."""
        return self._model.expected

    @property
    def device(self) -> torch.device:
        """Where its weights belong."""
        return self._model.device

    def wake(
        self, version: PolicyVersion, weights: Mapping[str, Tensor], adapter: Adapter | None
    ) -> None:
        """Give a hollow backend weights, which it uses where they lie; requests that waited are served.

        Args:
            weights: all parameters, and A and B of the adapter's modules, if there is one.
        Raises:
            SyncError, ConfigError, BackendError: they do not fit, or the model does not run on them; it
                sleeps on.
        """

        def rise() -> None:
            try:
                self._model.fill(weights, adapter)
                self._model.probe(self._cache)
            except Exception as error:
                self._model.hollow()
                self._cache.clear()
                if isinstance(error, ServiceError):
                    raise
                raise BackendError(f"the model does not run on these weights: {error}") from error
            self._version = version
            self._is_asleep = False

        self._call(rise).result()

    def sleep(self) -> None:
        """End all requests with the tokens so far; then hold neither weights nor keys and values."""

        def rest() -> None:
            self._is_asleep = True
            self._interrupt(None)
            self._plan = None
            self._cache.clear()
            self._model.hollow()

        self._call(rest).result()

    def stage(self, meta: WeightUpdateMeta, reader: WeightReader) -> Staged:
        if self._freeing is not None:
            self._freeing.join()  # two copies are held at most
        return self.fit(reader.stage(meta, self.parameters))

    def fit(self, staged: StagedWeights) -> Fitted:
        """A staged version as this backend swaps it in."""
        return self._model.fit(staged)

    async def swap(self, staged: Staged, policy: UpdatePolicy = "keep") -> int:
        if isinstance(staged, StagedWeights):
            staged = await asyncio.to_thread(self.fit, staged)
        if not isinstance(staged, Fitted):
            raise SyncError(f"{type(staged).__name__} was not staged by this backend")
        swap = _Swap(staged, policy)
        self._order(lambda: self._swaps.append(swap))
        try:
            running = await asyncio.wrap_future(swap.done)
        finally:
            self._nudge()  # if the caller gave up, the engine must stop draining for it
        self._freeing = threading.Thread(
            target=_let_go, args=(swap.replaced,), name="free weights", daemon=True
        )
        self._freeing.start()
        return running

    def load(self) -> Load:
        scheduler, cache = self._scheduler, self._cache
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
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        else:
            self._fail_all("the backend was closed")
        if self._freeing is not None:
            await asyncio.to_thread(self._freeing.join)

    def _sequence(self, req: LLMRequest, caller: Caller) -> Sequence:
        gconfig = req.gconfig
        if gconfig.stop and self._tokenizer is None:
            raise DataError("stop strings need a tokenizer; this model directory has none")
        return Sequence(
            request=req,
            stop_ids=frozenset(gconfig.stop_token_ids)
            | (frozenset() if gconfig.ignore_eos else self._model.eos_ids),
            stop_text=StopText(gconfig.stop, self._tokenizer)
            if gconfig.stop and self._tokenizer is not None
            else None,
            uniforms=random.Random(self._seeds.random() if gconfig.seed is None else gconfig.seed),
            arrival=time.monotonic(),
            caller=caller,
            tokens=list(req.input_ids),
        )

    def _order(self, order: Callable[[], None]) -> None:
        with self._wake:
            if self._is_stopping:
                raise BackendError(self._failure or "the backend is closed")
            self._inbox.append(order)
            self._wake.notify()

    def _call(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the engine thread, between two steps."""
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

        if not self._thread.is_alive() and not self._is_stopping:
            run()  # not started yet: nobody else is there
        else:
            self._order(run)
        return done

    def _nudge(self) -> None:
        with self._wake:
            self._wake.notify()

    # Everything below runs on the engine thread.

    def _run(self) -> None:
        reason = "the backend was closed"
        with torch.inference_mode():
            try:
                while self._take_orders():
                    before = time.monotonic()
                    self._step()
                    self._busy_s += time.monotonic() - before
            except Exception as error:
                log.exception("the engine thread died")
                reason = f"the engine died: {type(error).__name__}: {error}"
                self._failure = reason
            finally:
                self._fail_all(reason)

    def _take_orders(self) -> bool:
        """Sleep until there is something to do; false when closing."""
        while True:
            with self._wake:
                while not (self._is_stopping or self._inbox or self._is_due()):
                    self._wake.wait()
                is_stopping = self._is_stopping
            while self._inbox:  # one at a time: if one kills the engine, the others are not lost
                self._inbox.popleft()()
            self._deliver()
            if is_stopping:
                return False
            if self._is_due():
                return True

    def _is_due(self) -> bool:
        if any(s.is_cancelled for s in self._scheduler.sequences):
            return True
        return bool(self._swaps) or (not self._is_still and self._scheduler.has_work)

    @property
    def _is_still(self) -> bool:
        return self._is_paused or self._is_asleep

    def _step(self) -> None:
        for sequence in self._scheduler.sequences:
            if sequence.is_cancelled:
                self._scheduler.finish(sequence)
        self._swap_if_due()
        works = [] if self._is_still else self._scheduler.schedule()
        if works:
            self._compute(works)
        self._deliver()

    def _swap_if_due(self) -> None:
        while self._swaps:
            swap = self._swaps[0]
            if swap.done.cancelled():
                self._swaps.popleft()
                continue
            is_held = any(s.has_started for s in self._scheduler.sequences) and not self._is_paused
            if swap.policy == "drain" and is_held:
                self._scheduler.is_draining = True
                return
            self._apply(swap)
            self._swaps.popleft()  # only now: if the engine dies in it, the caller hears of it
        self._scheduler.is_draining = False

    def _apply(self, swap: _Swap) -> None:
        if not swap.done.set_running_or_notify_cancel():
            return  # the caller gave up before the swap began
        running = len([s for s in self._scheduler.sequences if s.has_started])
        if swap.policy == "abort":
            for sequence in self._scheduler.sequences:
                if sequence.has_started:
                    self._answer_early(sequence)
        elif swap.policy == "recompute":
            self._scheduler.retract()
        swap.replaced = self._model.exchange(swap.staged)
        self._cache.taint()
        self._version = swap.staged.version
        swap.done.set_result(running)

    def _interrupt(self, rid: str | None) -> None:
        for sequence in self._scheduler.sequences:
            if rid is None or sequence.request.rid == rid:
                self._answer_early(sequence)

    def _answer_early(self, sequence: Sequence) -> None:
        self._end(sequence, sequence.response("interrupt", None, time.monotonic()))

    def _compute(self, works: list[Work]) -> None:
        """One forward over the tokens of a step; samples where nothing is pending then."""
        ids: list[int] = []
        positions: list[int] = []
        for work in works:
            span = work.span
            ids.extend(work.sequence.tokens[span.start : span.end])
            positions.extend(range(span.start, span.end))
        wanted, scored = _wanted_logits(works)
        logits = self._model.forward(ids, positions, wanted, [work.span for work in works])
        for work in works:
            work.span.row.length = work.span.end
            if work.span.end - work.span.start > 1 or not work.sequence.num_output:
                self._num_prefilled += work.span.end - work.span.start
        self._score(scored, logits)
        self._sample([work.sequence for work in works if work.is_last], logits[len(scored) :])

    def _score(self, scored: list[tuple[Sequence, int]], logits: Tensor) -> None:
        """Logprobs of prompt tokens: row i of the logits predicts the token at `scored[i]`."""
        if not scored:
            return
        table = torch.log_softmax(logits[: len(scored)].float(), dim=-1)
        for (sequence, position), row in zip(scored, table, strict=True):
            sequence.prompt_logprobs[position] = float(row[sequence.tokens[position]])
            if sequence.request.top_logprobs:
                sequence.prompt_top[position] = top_logprobs(row, sequence.request.top_logprobs)

    def _sample(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Draw, stamp, and end what is finished."""
        if not sequences:
            return
        uniforms = torch.tensor([s.uniforms.random() for s in sequences], device=self._model.device)
        try:
            sampled = self._draw(sequences, logits, uniforms)
        except Exception:
            self._check_sampling(logits, uniforms)
            sound = self._refuse_broken(sequences, logits, uniforms)
            if len(sound) == len(sequences):
                raise  # no request's fault
            sequences = [sequences[row] for row in sound]
            if not sequences:
                return
            logits = logits[sound]
            sampled = self._draw(sequences, logits, uniforms[sound])
        now = time.monotonic()
        tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
        for row, sequence in enumerate(sequences):
            if logprobs[row] != logprobs[row] or abs(logprobs[row]) == float("inf"):
                self._scheduler.discard(sequence)
                self._plan = None
                self._tell(sequence, self._not_finite(sequence))
            elif sequence.request.gconfig.max_new_tokens == 0:
                self._end(sequence, sequence.response("length", None, now))
            else:
                self._num_generated += 1
                self._record(sequence, tokens[row], logprobs[row], row, sampled, now)

    def _draw(self, sequences: list[Sequence], logits: Tensor, uniforms: Tensor) -> Sampled:
        forbidden = [(row, f) for row, s in enumerate(sequences) if (f := s.forbidden)]
        return self._plan_for(sequences).sample(logits, uniforms, forbidden)

    def _check_sampling(self, logits: Tensor, uniforms: Tensor) -> None:
        """Raise what a request without any wish raises, too: then the engine is broken, not a request."""
        plain = SamplingRow(SamplingConfig())
        limits, device = self._model.limits, self._model.device
        SamplingPlan([plain], limits.vocab_size, device).sample(logits[:1], uniforms[:1])

    def _refuse_broken(
        self, sequences: list[Sequence], logits: Tensor, uniforms: Tensor
    ) -> list[int]:
        """Refuse the requests that cannot be sampled alone; returns the rows of the others."""
        sound = []
        for row, sequence in enumerate(sequences):
            self._plan = None
            try:
                self._draw([sequence], logits[row : row + 1], uniforms[row : row + 1])
            except Exception as error:
                name = sequence.request.rid
                log.exception("a request cannot be sampled", extra={"rid": name})
                reason = f"request {name} cannot be sampled: {type(error).__name__}: {error}"
                self._scheduler.discard(sequence)
                self._tell(sequence, DataError(reason))
            else:
                sound.append(row)
        self._plan = None
        return sound

    def _record(
        self,
        sequence: Sequence,
        token: int,
        logprob: float,
        row: int,
        sampled: Sampled,
        now: float,
    ) -> None:
        count = sequence.request.top_logprobs
        top = top_logprobs(sampled.scaled[row], count) if count else None
        sequence.append(token, logprob, self._version, top, now)
        if sequence.caller.on_delta is not None:
            delta = LLMDelta(
                output_tokens=[token],
                output_logprobs=[logprob],
                version=self._version,
                top_logprobs=None if top is None else [top],
            )
            self._tell(sequence, delta)
        ended = sequence.end()
        if ended is not None:
            self._end(sequence, sequence.response(*ended, now))

    def _end(self, sequence: Sequence, response: LLMResponse) -> None:
        self._scheduler.finish(sequence)
        self._tell(sequence, response)

    def _tell(self, sequence: Sequence, news: LLMDelta | LLMResponse | Exception) -> None:
        self._outbox.append((sequence.caller, news))

    def _deliver(self) -> None:
        """Send what is in the outbox, with one wake-up per event loop."""
        outbox, self._outbox = self._outbox, []
        for loop in {caller.loop for caller, _ in outbox}:
            mine = [(caller, news) for caller, news in outbox if caller.loop is loop]
            try:
                loop.call_soon_threadsafe(_take_all, mine)
            except RuntimeError:
                log.debug("an event loop closed before its answers came")

    def _plan_for(self, sequences: list[Sequence]) -> SamplingPlan:
        """The plan of these rows; that of the last step if they are the same."""
        if self._plan is None or self._plan[0] != sequences:
            rows = [
                SamplingRow(s.request.gconfig, s.request.input_ids, s.output) for s in sequences
            ]
            self._plan = (
                sequences,
                SamplingPlan(rows, self._model.limits.vocab_size, self._model.device),
            )
        return self._plan[1]

    def _not_finite(self, sequence: Sequence) -> BackendError:
        return BackendError(
            f"request {sequence.request.rid}: version {self._version} gave logits "
            "that are not finite"
        )

    def _fail_all(self, reason: str) -> None:
        with self._wake:
            self._is_stopping = True
            orders, self._inbox = self._inbox, deque()
        for order in orders:
            with suppress(Exception):  # its caller was told; most hand over work, which fails below
                order()
        sequences = self._scheduler.sequences
        self._scheduler.clear()
        for sequence in sequences:
            self._tell(sequence, BackendError(reason))
        self._deliver()
        for swap in self._swaps:
            with suppress(InvalidStateError):  # its caller gave up
                swap.done.set_exception(BackendError(reason))


def _let_go(tensors: list[Tensor]) -> None:
    """Free tensors a few at a time: giving back memory delays threads that allocate, as decoding does."""
    freed = 0
    while tensors:
        freed += tensors.pop().nbytes
        if freed >= FREE_BYTES:
            time.sleep(FREE_INTERVAL_S)
            freed = 0


def _take_all(mine: list[tuple[Caller, LLMDelta | LLMResponse | Exception]]) -> None:
    for caller, news in mine:
        caller.take(news)


def _wanted_logits(works: list[Work]) -> tuple[list[int], list[tuple[Sequence, int]]]:
    """Positions in the step whose logits are wanted: first those that score a prompt's tokens, each
    with its sequence and the position that it predicts, then the last ones of what is sampled."""
    wanted: list[int] = []
    scored: list[tuple[Sequence, int]] = []
    for work in works:
        sequence, span = work.sequence, work.span
        first = sequence.scored_from
        if first is None:
            continue
        for position in range(max(span.start, first - 1), min(span.end, sequence.num_prompt - 1)):
            wanted.append(span.first + position - span.start)
            scored.append((sequence, position + 1))
    last = [work.span.first + work.span.end - work.span.start - 1 for work in works if work.is_last]
    return wanted + last, scored
