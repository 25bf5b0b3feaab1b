"""The embedded torch backend: continuous batching for any full-attention causal LM of transformers.

One engine thread owns the model, the KV cache and all sequences. Between two decode steps it applies
a waiting weight swap, drops cancelled sequences and admits new ones (one prefill per distinct prompt,
so siblings of a group share it); then one forward samples one token for every running sequence. Event
loops hand over work through `_inbox` and wake the thread; results go back with
`call_soon_threadsafe`, once per step. The version is read and changed on the engine thread only,
which is why the version of a token is the one that sampled it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.errors import BackendError, ConfigError, DataError, RequestTooLong
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion, StopReason
from inference_server.backends.base import Load
from inference_server.backends.kv_cache import SlotCache
from inference_server.sampler import SamplingPlan
from weight_sync.channel import StagedWeights
from weight_sync.model_dir import load_model

log = logging.getLogger(__name__)

LENGTH_STEP = 32
"""Attention reads the cache up to a multiple of this, so that shapes repeat."""


@dataclass
class _Sequence:
    request: LLMRequest
    future: asyncio.Future[LLMResponse]
    loop: asyncio.AbstractEventLoop
    uniforms: random.Random
    stop_ids: frozenset[int]
    arrival: float
    first_token: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[tuple[PolicyVersion, int, int]] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def length(self) -> int:
        """Positions whose key and value are in the cache once the last token was fed."""
        return len(self.request.input_ids) + len(self.tokens)


@dataclass
class _Swap:
    staged: StagedWeights
    done: Future[int]


class EmbeddedTorchBackend:
    """`GenerationBackend` on this machine's CPU or one GPU."""

    def __init__(
        self, config: EmbeddedTorchConfig, model: ModelConfig, version: PolicyVersion
    ) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._config = config
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = load_model(model).to(self._device).eval().requires_grad_(False)
        text = self._model.config.get_text_config()
        self._vocab_size: int = text.vocab_size
        self.max_context = min(config.max_context or 2**31, text.max_position_embeddings)
        self._adds_mask = model.attn_implementation == "eager"  # it adds the mask to the scores
        self._eos = _eos_ids(self._model)
        self._version = version
        self._cache = _make_cache(text, config, self.max_context, self._model.dtype, self._device)
        self._seeds = random.Random(config.seed)
        self._inbox: deque[_Sequence | _Swap] = deque()
        self._swaps: deque[_Swap] = deque()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._plan: SamplingPlan | None = None
        self._wake = threading.Condition()
        self._stopping = False
        self._has_died = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._started = time.monotonic()
        self._busy_s = 0.0
        self._num_tokens = 0

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def parameters(self) -> Mapping[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self._model.named_parameters()}

    @property
    def is_alive(self) -> bool:
        return not self._has_died

    def start(self) -> None:
        self._started = time.monotonic()
        self._thread.start()

    async def generate(self, req: LLMRequest) -> LLMResponse:
        self._check(req)
        loop = asyncio.get_running_loop()
        gconfig = req.gconfig
        sequence = _Sequence(
            request=req,
            future=loop.create_future(),
            loop=loop,
            uniforms=random.Random(self._seeds.random() if gconfig.seed is None else gconfig.seed),
            stop_ids=frozenset(gconfig.stop_token_ids)
            | (frozenset() if gconfig.ignore_eos else self._eos),
            arrival=time.monotonic(),
        )
        self._hand_over(sequence)
        try:
            return await sequence.future
        finally:
            sequence.is_cancelled = True  # of no effect on a finished one

    async def swap(self, staged: StagedWeights) -> int:
        swap = _Swap(staged, Future())
        self._hand_over(swap)
        return await asyncio.wrap_future(swap.done)

    def load(self) -> Load:
        queued = len(self._waiting) + len(self._inbox)
        uptime_s = time.monotonic() - self._started
        return Load(len(self._running), queued, self._num_tokens, self._busy_s, uptime_s)

    def close(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._fail_all("the backend was closed")

    def _check(self, req: LLMRequest) -> None:
        wanted = len(req.input_ids) + req.gconfig.max_new_tokens
        if wanted > self.max_context:
            raise RequestTooLong(
                f"{len(req.input_ids)} prompt tokens + max_new_tokens={req.gconfig.max_new_tokens} "
                f"exceed the context of {self.max_context}; shorten the prompt or max_new_tokens"
            )
        for name, ids in (
            ("input_ids", req.input_ids),
            ("stop_token_ids", req.gconfig.stop_token_ids),
        ):
            if ids and max(ids) >= self._vocab_size:
                raise DataError(
                    f"{name} holds {max(ids)}, the vocabulary has {self._vocab_size} tokens"
                )

    def _hand_over(self, item: _Sequence | _Swap) -> None:
        with self._wake:
            if self._stopping:
                raise BackendError("the backend is closed")
            self._inbox.append(item)
            self._wake.notify()

    # Everything below runs on the engine thread.

    def _run(self) -> None:
        reason = "the backend was closed"
        try:
            with torch.inference_mode():
                while self._take_work():
                    before = time.monotonic()
                    self._step()
                    self._busy_s += time.monotonic() - before
        except Exception as error:
            log.exception("the engine thread died")
            self._has_died = True
            reason = f"the engine died: {type(error).__name__}: {error}"
        finally:
            self._fail_all(reason)

    def _take_work(self) -> bool:
        """Sleep until there is something to do; false when closing."""
        with self._wake:
            while not (self._stopping or self._inbox or self._running or self._waiting):
                self._wake.wait()
            while self._inbox:
                item = self._inbox.popleft()
                if isinstance(item, _Swap):
                    self._swaps.append(item)
                else:
                    self._waiting.append(item)
            return not self._stopping

    def _step(self) -> None:
        while self._swaps:
            self._apply(self._swaps[0])
            self._swaps.popleft()  # only now: if the engine dies in it, the caller hears of it
        self._drop_cancelled()
        self._admit()
        if self._running:
            self._decode()

    def _apply(self, swap: _Swap) -> None:
        if not swap.done.set_running_or_notify_cancel():
            return  # the caller gave up before the swap began
        for name, parameter in self._model.named_parameters():
            parameter.copy_(swap.staged.tensors[name])
        self._version = swap.staged.version
        swap.done.set_result(len(self._running))

    def _admit(self) -> None:
        """Prefill waiting sequences while slots are free."""
        while self._waiting and len(self._running) < self._config.max_sequences:
            batch = self._next_prefill()
            if batch:
                self._prefill(batch)

    def _next_prefill(self) -> list[_Sequence]:
        """Oldest waiting sequences whose distinct prompts fit one padded pass."""
        batch: list[_Sequence] = []
        prompts: set[tuple[int, ...]] = set()
        longest = 0
        free = self._config.max_sequences - len(self._running)
        while self._waiting and len(batch) < free:
            candidate = self._waiting[0]
            if candidate.is_cancelled:
                self._waiting.popleft()
                continue
            prompt = candidate.request.input_ids
            width = max(longest, len(prompt))
            if batch and width * len(prompts | {prompt}) > self._config.max_prefill_tokens:
                break
            prompts.add(prompt)
            longest = width
            batch.append(self._waiting.popleft())
        return batch

    def _prefill(self, batch: list[_Sequence]) -> None:
        """Run the distinct prompts, left-padded, and sample the first token of every sequence."""
        rows_of: dict[tuple[int, ...], int] = {}
        for sequence in batch:
            rows_of.setdefault(sequence.request.input_ids, len(rows_of))
        width = max(len(prompt) for prompt in rows_of)
        input_ids = torch.zeros(len(rows_of), width, dtype=torch.long)
        padding = torch.empty(len(rows_of), 1, dtype=torch.long)
        for prompt, row in rows_of.items():
            padding[row] = width - len(prompt)
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        first_slot = len(self._running)
        rows, columns, slots, positions = [], [], [], []
        for offset, sequence in enumerate(batch):
            prompt = sequence.request.input_ids
            row = rows_of[prompt]
            rows.append(torch.full((len(prompt),), row))
            columns.append(torch.arange(width - len(prompt), width))
            slots.append(torch.full((len(prompt),), first_slot + offset))
            positions.append(torch.arange(len(prompt)))
        place = [torch.cat(part).to(self._device) for part in (rows, columns, slots, positions)]
        self._cache.plan_prefill(*place)
        column = torch.arange(width)
        allowed = (column[None, :, None] >= column[None, None, :]) & (
            column[None, None, :] >= padding[:, :, None]
        )
        allowed |= torch.eye(
            width, dtype=torch.bool
        )  # a padded row with nothing to read would be NaN
        self._running.extend(batch)
        self._plan = None
        logits = self._forward(input_ids, (column[None] - padding).clamp(min=0), allowed[:, None])
        new_rows = torch.tensor([rows_of[sequence.request.input_ids] for sequence in batch])
        self._take_tokens(
            batch,
            logits[new_rows.to(self._device)],
            SamplingPlan([s.request.gconfig for s in batch], self._device),
        )

    def _decode(self) -> None:
        """One token for every running sequence."""
        running = self._running
        last = torch.tensor([sequence.tokens[-1] for sequence in running])[:, None]
        positions = torch.tensor([sequence.length - 1 for sequence in running])
        longest = int(positions.max()) + 1
        length = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, self.max_context)
        on_device = positions.to(self._device)
        self._cache.plan_decode(torch.arange(len(running), device=self._device), on_device, length)
        allowed = torch.arange(length)[None, :] <= positions[:, None]
        logits = self._forward(last, positions[:, None], allowed[:, None, None])
        if self._plan is None:
            self._plan = SamplingPlan(
                [sequence.request.gconfig for sequence in running], self._device
            )
        self._take_tokens(running, logits, self._plan)

    def _forward(self, input_ids: Tensor, position_ids: Tensor, allowed: Tensor) -> Tensor:
        """Logits [n, V] of the last column; `allowed` [n, 1, q, k] says what each query may read."""
        mask = allowed.to(self._device)
        if self._adds_mask:
            smallest = torch.finfo(self._model.dtype).min
            mask = torch.zeros_like(mask, dtype=self._model.dtype).masked_fill(~mask, smallest)
        output = self._model(
            input_ids=input_ids.to(self._device),
            position_ids=position_ids.to(self._device),
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _take_tokens(self, sequences: list[_Sequence], logits: Tensor, plan: SamplingPlan) -> None:
        """Sample, stamp, and end what is finished."""
        uniforms = torch.tensor([s.uniforms.random() for s in sequences], device=self._device)
        forbidden = [
            (row, sorted(s.stop_ids))
            for row, s in enumerate(sequences)
            if s.stop_ids and len(s.tokens) < s.request.gconfig.min_new_tokens
        ]
        tokens, logprobs = plan.sample(logits, uniforms, forbidden)
        now = time.monotonic()
        finished: list[tuple[_Sequence, LLMResponse | BackendError]] = []
        first_slot = len(self._running) - len(sequences)
        for slot, (sequence, token, logprob) in enumerate(
            zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True), start=first_slot
        ):
            if logprob != logprob or logprob == float("-inf"):
                error = BackendError(
                    f"request {sequence.request.rid}: version {self._version} gave logits "
                    "that are not finite"
                )
                finished.append((sequence, error))
                self._cache.clear(slot)
                continue
            self._record(sequence, token, logprob, now)
            reason = _stop_reason(sequence, token)
            if reason is not None:
                finished.append((sequence, _response(sequence, reason, now)))
        self._num_tokens += len(sequences)
        self._end(finished)

    def _record(self, sequence: _Sequence, token: int, logprob: float, now: float) -> None:
        position = len(sequence.tokens)
        if not sequence.tokens:
            sequence.first_token = now
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        runs = sequence.runs
        start = runs.pop()[1] if runs and runs[-1][0] == self._version else position
        runs.append((self._version, start, position + 1))

    def _end(self, finished: list[tuple[_Sequence, LLMResponse | BackendError]]) -> None:
        """Free the slots and answer, one wake-up per event loop."""
        if not finished:
            return
        self._remove({id(sequence) for sequence, _ in finished})
        loops = {sequence.loop for sequence, _ in finished}
        for loop in loops:
            mine = [(s.future, outcome) for s, outcome in finished if s.loop is loop]
            try:
                loop.call_soon_threadsafe(_answer, mine)
            except RuntimeError:
                log.debug("an event loop closed before its answers came")

    def _drop_cancelled(self) -> None:
        cancelled = {id(sequence) for sequence in self._running if sequence.is_cancelled}
        if cancelled:
            self._remove(cancelled)

    def _remove(self, doomed: set[int]) -> None:
        """Take sequences out; the last ones move into the holes, so rows stay contiguous."""
        running = self._running
        row = 0
        while row < len(running):
            if id(running[row]) not in doomed:
                row += 1
                continue
            last = running.pop()
            if row < len(running):
                if id(last) not in doomed:
                    self._cache.move(len(running), row, last.length)
                running[row] = last
        self._plan = None

    def _fail_all(self, reason: str) -> None:
        with self._wake:
            self._stopping = True
            items = [*self._running, *self._waiting, *self._inbox]
            swaps = [*self._swaps, *(item for item in items if isinstance(item, _Swap))]
            self._inbox.clear()
        self._end([(s, BackendError(reason)) for s in items if isinstance(s, _Sequence)])
        for swap in swaps:
            if not swap.done.done():
                swap.done.set_exception(BackendError(reason))


def _answer(outcomes: list[tuple[asyncio.Future[LLMResponse], LLMResponse | BackendError]]) -> None:
    for future, outcome in outcomes:
        if future.done():
            continue
        if isinstance(outcome, BackendError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _stop_reason(sequence: _Sequence, token: int) -> StopReason | None:
    if token in sequence.stop_ids:
        return "stop"
    if len(sequence.tokens) >= sequence.request.gconfig.max_new_tokens:
        return "length"
    return None


def _response(sequence: _Sequence, reason: StopReason, now: float) -> LLMResponse:
    return LLMResponse(
        rid=sequence.request.rid,
        output_tokens=sequence.tokens,
        output_logprobs=sequence.logprobs,
        version_runs=sequence.runs,
        stop_reason=reason,
        latency_s=now - sequence.arrival,
        ttft_s=sequence.first_token - sequence.arrival,
    )


def _eos_ids(model: Any) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset({eos})


def _make_cache(
    text: Any,
    config: EmbeddedTorchConfig,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
) -> SlotCache:
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"the embedded torch backend runs full-attention models; this one has layers of type {kinds}"
        )
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return SlotCache(
        text.num_hidden_layers, config.max_sequences, kv_heads, max_context, head_dim, dtype, device
    )
