"""The embedded torch backend: continuous batching for causal LMs of transformers, on CPU or one GPU.

`DecodeLoop` computes on a thread of its own; this is its front for event loops, with what need not
wait for a step: requests are checked and versions are read and fitted beside it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig, UpdatePolicy
from headway.contracts.engines import OnDelta
from headway.contracts.errors import Conflict, SyncError
from headway.contracts.http.generation import PauseMode
from headway.contracts.types import (
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    WeightUpdateMeta,
)
from headway.text.tokenizer import TextTokenizer
from inference_server.backends.base import Limits, Load, StagedVersion, check_request
from inference_server.backends.embedded.decode_loop import DecodeLoop
from inference_server.backends.embedded.device import Device, local_device
from inference_server.backends.embedded.grammar import Grammars, GrammarState
from inference_server.backends.embedded.model import EmbeddedModel, PreparedVersion
from inference_server.backends.embedded.sequence import Caller, Sequence
from inference_server.backends.embedded.swaps import ReplacedWeights, Swap
from weight_sync.adapter_dir import read_adapter
from weight_sync.channel import StagedWeights, WeightReader
from weight_sync.manifest import Adapter

T = TypeVar("T")


class EmbeddedTorchBackend:
    """`GenerationBackend` on this machine's CPU or one GPU."""

    def __init__(
        self,
        config: EmbeddedTorchConfig,
        model: ModelConfig,
        version: PolicyVersion,
        tokenizer: TextTokenizer | None = None,
        without_weights: bool = False,
        device: Device | None = None,
    ) -> None:
        """
        Args:
            without_weights: asleep and without weights, until `take_weights`.
            device: where it computes; None takes `config.device`.
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        where = device or local_device(config.device)
        self._runs_apart = where.is_host
        self.model = self._apart(
            lambda: EmbeddedModel(
                model, config.pack_weights, config.max_context, without_weights, where
            )
        )
        self._config = config
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, self.model.limits.vocab_size, self.model.eos_ids)
        self._decode_loop = self._apart(
            lambda: DecodeLoop(config, self.model, version, without_weights)
        )
        self._seeds = random.Random(config.seed)
        self._replaced = ReplacedWeights()

    @property
    def limits(self) -> Limits:
        return self.model.limits

    @property
    def version(self) -> PolicyVersion:
        return self._decode_loop.version

    @property
    def num_ranks(self) -> int:
        return 1

    @property
    def is_paused(self) -> bool:
        return self._decode_loop.is_paused

    @property
    def failure(self) -> str | None:
        return self._decode_loop.failure

    @property
    def parameters(self) -> Mapping[str, torch.Size]:
        """Names and shapes that a version must bring."""
        return self.model.parameters

    @property
    def expected(self) -> Mapping[str, Tensor]:
        """The parameters that a backend without weights has to be given, on the meta device."""
        return self.model.expected

    @property
    def device(self) -> torch.device:
        """Device that its weights belong on."""
        return self.model.device.where

    def read_parameter(self, name: str) -> Tensor:
        """A copy of one parameter, as it is between two steps.

        Raises:
            DataError: the model has no parameter of this name.
        """
        return self._decode_loop.call(lambda: self.model.read(name)).result()

    async def start(self) -> None:
        self._decode_loop.start()

    async def generate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        check_request(req, self.model.limits)
        if req.adapter is not None:
            self.model.adapters.version(req.adapter)
        loop = asyncio.get_running_loop()
        grammar = None
        if req.gconfig.has_grammar:
            grammar = await asyncio.to_thread(self._grammars.state_of, req.gconfig)
        caller = Caller(loop, loop.create_future(), on_delta)
        sequence = self._sequence(req, caller, grammar)
        self._decode_loop.submit(sequence)
        try:
            return await caller.future
        except BaseException:  # cancelled, or its own `on_delta` raised
            self._decode_loop.cancel(sequence)
            raise

    async def abort(self, rid: str | None) -> None:
        await self._call(lambda: self._decode_loop.interrupt(rid))

    async def pause(self, mode: PauseMode) -> None:
        await self._call(lambda: self._decode_loop.pause(mode))

    async def resume(self) -> None:
        await self._call(self._decode_loop.resume)

    async def flush(self) -> bool:
        return await self._call(self._decode_loop.flush)

    def take_weights(
        self, version: PolicyVersion, weights: Mapping[str, Tensor], adapter: Adapter | None
    ) -> None:
        """Give weights to a backend without any, which uses them in place; waiting requests are served.

        Args:
            weights: all parameters, and A and B of the adapter's modules, if there is one.
        Raises:
            SyncError, ConfigError, BackendError: they do not fit, or the model does not run on them; it
                sleeps on.
        """
        self._decode_loop.call(lambda: self._decode_loop.wake(version, weights, adapter)).result()

    def drop_weights(self) -> None:
        """End all requests with the tokens so far; then hold neither weights nor keys and values."""
        self._decode_loop.call(self._decode_loop.sleep).result()

    def stage(self, meta: WeightUpdateMeta, reader: WeightReader) -> StagedVersion:
        self._replaced.wait()  # two copies are held at most
        return self._apart(lambda: self.model.fit(reader.stage(meta, self.parameters)))

    async def swap(self, staged: StagedVersion, policy: UpdatePolicy = "keep") -> int:
        if isinstance(staged, StagedWeights):
            weights = staged
            staged = await asyncio.to_thread(self._apart, lambda: self.model.fit(weights))
        if not isinstance(staged, PreparedVersion):
            raise SyncError(f"{type(staged).__name__} was not staged by this backend")
        swap = Swap(staged, policy)
        running = await self._decode_loop.swap(swap)
        self._replaced.free(swap.replaced)
        return running

    @property
    def adapters(self) -> Mapping[str, PolicyVersion]:
        """Version of each loaded adapter, by name."""
        return self.model.adapters.versions

    @property
    def max_adapters(self) -> int:
        """See `AdapterBackend`."""
        return self._config.max_adapters

    async def load_adapter(self, name: str, folder: Path, version: PolicyVersion) -> None:
        """See `AdapterBackend`."""
        bank, most = self.model.adapters, self._config.max_adapters
        if name not in bank.versions and len(bank.versions) >= most:
            raise Conflict(f"backend.max_adapters={most} adapters are loaded; unload one")
        loaded = await asyncio.to_thread(lambda: bank.prepare(*read_adapter(folder), version))
        await self._call(lambda: self._decode_loop.put_adapter(name, loaded))

    async def unload_adapter(self, name: str) -> None:
        """See `AdapterBackend`."""
        await self._call(lambda: self._decode_loop.drop_adapter(name))

    def load(self) -> Load:
        return self._decode_loop.load()

    async def aclose(self) -> None:
        await self._decode_loop.aclose()
        await asyncio.to_thread(self._replaced.wait)

    def _sequence(
        self, req: LLMRequest, caller: Caller, grammar: GrammarState | None = None
    ) -> Sequence:
        eos_ids = frozenset() if req.gconfig.ignore_eos else self.model.eos_ids
        guesses = self._config.speculative_tokens
        return Sequence.of(req, caller, eos_ids, self._tokenizer, self._seeds, grammar, guesses)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._decode_loop.call(work))

    def _apart(self, work: Callable[[], T]) -> T:
        """Run `work` on a thread that ends with it, and so do the helpers that OpenMP gave it.

        Helpers that stay count: with more of them than cores, those of the decode loop go to sleep after
        every product instead of waiting for the next one. On a GPU it runs here.
        """
        if not self._runs_apart:
            return work()
        with ThreadPoolExecutor(1, "prepare") as passing:
            return passing.submit(copy_context().run, work).result()
