"""A model of transformers as the engine runs it: one forward over a step, weights that are exchanged.

Linear weights are packed for the CPU. A version is brought to the model's type and device while it is
staged. On the CPU a swap exchanges pointers. On a GPU it copies into place, at the rate of its memory:
graphs of decode steps go on reading where they did, and only one copy is held between swaps. Where a GPU
cannot hold a second copy, the swap copies from pinned memory of the host. The tensors of a
version as it came must not be written to: they are the base of deltas, are read by peers, and may be in
memory of another process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.errors import ConfigError, DataError
from inference_server.backends.base import HeldVersion, Limits
from inference_server.backends.embedded import attention
from inference_server.backends.embedded.adapted_linear import AdaptedLinears
from inference_server.backends.embedded.adapter_bank import AdapterBank
from inference_server.backends.embedded.attention import Span, Step, StepTokens
from inference_server.backends.embedded.device import Device, local_device
from inference_server.backends.embedded.expert_recorder import ExpertRecorder
from inference_server.backends.embedded.fused_forward import can_fuse, fuse
from inference_server.backends.embedded.kv_cache import OUT_OF_MEMORY, KVCache, KVShape
from inference_server.backends.embedded.packed_linear import (
    PackedProducts,
    PackedWeight,
    Product,
    can_pack,
    packed_linears,
)
from inference_server.backends.embedded.paged_cache import PagedCache, pool_tokens
from inference_server.backends.embedded.runner import PagedRunner, SlabRunner, StepRunner
from inference_server.backends.embedded.slab_cache import SlabCache
from weight_sync.adapter import adapter_pairs, scale_of
from weight_sync.channel import StagedWeights
from weight_sync.checkpoint_names import CheckpointNames
from weight_sync.manifest import Adapter
from weight_sync.model_dir import load_model, model_without_weights

log = logging.getLogger(__name__)

SLAB_SHARE = 0.4
"""Share of the free memory that slabs take by default: a slab that grows is held twice."""
POOL_SHARE = 0.8
"""The same of a pool, which is allocated once. The rest is for activations and logits."""
LAYER_KINDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class PreparedVersion(HeldVersion):
    """A verified version in the form in which the model holds its weights.

    What it was is `held`: the same memory where type and device are the model's.
    """

    tensors: Mapping[str, Tensor]
    packed: Mapping[Product, PackedWeight]


class EmbeddedModel:
    """One causal language model on the CPU or one GPU; used by one thread, except for `fit`."""

    def __init__(
        self,
        config: ModelConfig,
        pack_weights: bool,
        max_context: int | None,
        without_weights: bool = False,
        device: Device | None = None,
    ) -> None:
        """
        Args:
            without_weights: without weights, until some are put in by `fill`.
            device: where it computes; None takes the GPU of this process if it sees one.
        """
        self.device = local_device() if device is None else device
        self.module = _load(config, without_weights)
        self._names = CheckpointNames(self.module)
        self.expected = {name: p.data for name, p in self.module.named_parameters()}
        """The parameters of a model without weights, on the meta device."""
        if without_weights:
            _empty(self.module)
        else:
            self.expected = {}
        self.device.place(self.module)
        where = self.device.where
        packs = pack_weights and self.device.is_host and can_pack(where, self.module.dtype)
        self._packed: PackedProducts | None = None
        if packs and not without_weights:
            pack = fuse if can_fuse(self.module) else packed_linears
            self._packed = pack(self.module)
        text = self.module.config.get_text_config()
        self.limits = Limits(
            text.vocab_size, min(max_context or 2**31, text.max_position_embeddings)
        )
        self._parameters = dict(self.module.named_parameters())
        self.recorder = ExpertRecorder(self.module)
        self.adapters = AdapterBank(self.module, self._packed)
        self._adapted = AdaptedLinears(self.module)
        self._nothing = {name: p.data for name, p in self._parameters.items() if without_weights}
        self.kv_shape = _kv_shape(text, self.module.dtype, where)
        self.eos_ids = _eos_ids(self.module)

    @property
    def parameters(self) -> Mapping[str, torch.Size]:
        """Names and shapes that a version must bring."""
        return self._names.shapes

    def read(self, name: str) -> Tensor:
        """A copy of one parameter on the CPU; tied ones go by each of their names.

        Raises:
            DataError: there is none of this name.
        """
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        found = self._names.read(name, parameters)
        if found is None:
            raise DataError(f"the model has no parameter {name!r}")
        return found.detach().cpu().clone()

    def fit(self, staged: StagedWeights) -> PreparedVersion:
        """The same version as the model holds its weights, ready to be exchanged for them."""
        with self.device.staging():
            merged = self._names.merge(staged.tensors)
            try:
                tensors = self._placed(merged)
            except OUT_OF_MEMORY:
                log.warning("no room for a second copy on the GPU: the swap copies from the host")
                tensors = self._held(merged)
        packed = {} if self._packed is None else self._packed.pack(tensors)
        return PreparedVersion(staged, tensors, packed)

    def exchange(self, prepared: PreparedVersion) -> list[Tensor]:
        """Put a version in place.

        Returns:
            What it replaced. Freeing that much memory takes as long as copying it: let another
            thread do it.
        """
        if not self.device.is_host:
            names = list(self._parameters)
            targets = [self._parameters[name].data for name in names]
            torch._foreach_copy_(targets, [prepared.tensors[n] for n in names], non_blocking=True)
            self.device.synchronize()  # the copies are read from memory that is now given back
            return []
        replaced = [] if self._packed is None else self._packed.exchange(prepared.packed)
        for name, parameter in self._parameters.items():
            replaced.append(parameter.data)
            parameter.data = prepared.tensors[name]
        return replaced

    def fill(self, weights: Mapping[str, Tensor], adapter: Adapter | None) -> None:
        """Give weights to a model without any, in place.

        Args:
            weights: all parameters, and A and B of the adapter's modules.
        Raises:
            SyncError: the adapter does not fit; the model stays without weights.
        """
        if adapter is not None:
            halves = {n: t for n, t in weights.items() if n not in self._parameters}
            self._adapted.put_in(adapter_pairs(halves, adapter), scale_of(adapter))
        for name, parameter in self._parameters.items():
            parameter.data = weights[name]
        self.runner.forget()

    def drop_weights(self) -> None:
        """Hold no weights any more."""
        self.runner.forget()
        self._adapted.take_out()
        for name, nothing in self._nothing.items():
            self._parameters[name].data = nothing

    def _placed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors in the types of their parameters, on the model's device."""
        return {
            name: tensor.to(self.device.where, self._parameters[name].dtype).contiguous()
            for name, tensor in tensors.items()
        }

    def _held(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same on the host."""
        return {
            name: self.device.hold(tensor.to("cpu", self._parameters[name].dtype))
            for name, tensor in tensors.items()
        }

    def forward(self, ids: Tensor, positions: Tensor, wanted: Tensor, step: Step) -> Tensor:
        """One step.

        Args:
            ids, positions: [T] the tokens of the step, and where each stands in its sequence.
            wanted: [w] places in the step whose logits are returned.
        Returns:
            [w, V].
        """
        output = self.module(
            input_ids=ids[None],
            position_ids=positions[None],
            logits_to_keep=wanted,
            use_cache=False,
            step=step,
        )
        logits: Tensor = output.logits[0]
        return logits

    def make_runner(self, config: EmbeddedTorchConfig) -> tuple[KVCache[Any], StepRunner]:
        """Build a cache within the configured memory, and the runner of steps over it; check that the
        model runs on them, unless it has no weights.

        Raises:
            ConfigError: the memory does not hold one sequence, or the model does not fit this backend.
            BackendError: there is no memory for one sequence.
        """
        attention = self.device.varlen_attention(self.kv_shape.dtype, self.kv_shape.head_dim)
        is_paged = attention is not None
        max_context, max_kept = self.limits.max_context, config.max_sequences
        budget = self._kv_budget(config, is_paged)
        self._check_budget(budget, is_paged)
        cache: KVCache[Any]
        if attention is not None:
            cache = PagedCache(
                self.kv_shape, max_context, lambda: self._kv_budget(config, True), max_kept
            )
            self.runner: StepRunner = PagedRunner(
                self.forward,
                cache,
                attention,
                self.device,
                self.adapters,
                has_graphs=config.cuda_graphs and not self.recorder.is_used,
            )
        else:
            with self.device.decoding():
                cache = SlabCache(self.kv_shape, max_context, budget, max_kept)
            num_kv_heads = self.kv_shape.num_kv_heads
            self.runner = SlabRunner(self.forward, num_kv_heads, self.device, self.adapters)
        if not self._nothing:
            self.probe(cache)
        return cache, self.runner

    def probe(self, cache: KVCache[Any]) -> None:
        """Find out now, not on the first request, whether the model fits."""
        with self.device.decoding():
            row = cache.allocate(2)
            if row is None:
                raise ConfigError("no room in the KV cache for two tokens")
            try:
                self.runner.run(StepTokens([0, 0], [0, 1], [1], [Span(row, 0, 2, 0)], [0.5]))
            finally:
                row.length = 2
                cache.release(row, keep=False)
                self.recorder.take(None)

    def _kv_budget(self, config: EmbeddedTorchConfig, is_paged: bool) -> int:
        """Bytes for keys and values: as configured, or a share of what is free beside a second copy of
        the weights, if a sequence still fits. If it does not fit, swaps copy from the host."""
        if config.kv_cache_bytes is not None:
            return config.kv_cache_bytes
        one = self._sequence_bytes(is_paged)
        share = POOL_SHARE if is_paged else SLAB_SHARE
        free = self.device.free_bytes()
        beside = free if self.device.is_host else free - self._weight_bytes
        room = int(share * (beside if share * beside >= one else free))
        return min(2 * config.max_sequences * one, max(one, room))

    def _check_budget(self, budget: int, is_paged: bool) -> None:
        one = self._sequence_bytes(is_paged)
        if budget < one:
            raise ConfigError(
                f"backend.kv_cache_bytes={budget} holds no sequence of {self.limits.max_context} "
                f"tokens; give at least {one}, or a smaller backend.max_context"
            )

    def _sequence_bytes(self, is_paged: bool) -> int:
        """Memory for one whole sequence, and in a pool for the block that belongs to no row."""
        tokens = self.limits.max_context
        return (pool_tokens(tokens) if is_paged else tokens) * self.kv_shape.token_bytes

    @property
    def _weight_bytes(self) -> int:
        if self._nothing:
            return 0  # another's; there is no swap
        return sum(parameter.nbytes for parameter in self._parameters.values())


def _load(config: ModelConfig, without_weights: bool) -> Any:
    if config.attn_implementation != "sdpa":
        raise ConfigError(
            f"model.attn_implementation={config.attn_implementation} is for training; the embedded "
            "torch backend has an attention of its own: leave it out"
        )
    attention.register()
    load = model_without_weights if without_weights else load_model
    model = load(config.model_copy(update={"attn_implementation": attention.NAME}))
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if not kinds <= LAYER_KINDS or not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"the embedded torch backend does not run {type(model).__name__} with layers of type "
            f"{sorted(kinds)}; use backend.type: sglang"
        )
    return model.eval().requires_grad_(False)


def _empty(model: torch.nn.Module) -> None:
    """Parameters without elements in place of those on the meta device, which cannot be given values;
    tied ones stay the same."""
    empty: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                nothing = torch.empty(0, dtype=parameter.dtype)
                kept = empty.setdefault(
                    id(parameter), torch.nn.Parameter(nothing, requires_grad=False)
                )
                module._parameters[name] = kept


def _eos_ids(model: Any) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset({eos})


def _kv_shape(text: Any, dtype: torch.dtype, device: torch.device) -> KVShape:
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return KVShape(text.num_hidden_layers, kv_heads, head_dim, dtype, device)
