"""A model of transformers as the engine runs it: one forward over a step, weights that are exchanged.

Linear weights are packed for the CPU. A version is brought to the model's type and device while it is
staged, so that a swap exchanges pointers; only a GPU without room for a second copy is written to in
place. What a version came as is nobody's to write to: it is the base of deltas, it is read by peers,
and it may lie in memory of another process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.errors import ConfigError, DataError, SyncError
from headway.contracts.types import PolicyVersion
from inference_server.backends.base import Limits
from inference_server.backends.embedded import attention
from inference_server.backends.embedded.adapted_linear import AdaptedLinears
from inference_server.backends.embedded.attention import Span, Step
from inference_server.backends.embedded.kv_cache import KVCache, KVShape
from inference_server.backends.embedded.packed_linear import PackedLinears, can_pack
from weight_sync.adapter import adapter_pairs, scale_of
from weight_sync.channel import StagedWeights
from weight_sync.manifest import Adapter
from weight_sync.model_dir import hollow_model, load_model

log = logging.getLogger(__name__)

FREE_SHARE = 0.4
"""Share of the free memory that keys and values take unless told otherwise."""
LAYER_KINDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Fitted:
    """A proven version in the form in which the model holds its weights."""

    held: StagedWeights
    """As it came; the same memory where type and device are the model's."""
    tensors: Mapping[str, Tensor]
    packed: Mapping[str, Tensor]

    @property
    def version(self) -> PolicyVersion:
        return self.held.version

    @property
    def digest(self) -> str:
        return self.held.digest


class EmbeddedModel:
    """One causal language model on the CPU or one GPU; used by one thread, but for `fit`."""

    def __init__(
        self,
        config: ModelConfig,
        pack_weights: bool,
        max_context: int | None,
        is_hollow: bool = False,
    ) -> None:
        """
        Args:
            is_hollow: without weights, until some are put in by `fill`.
        """
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module = _load(config, is_hollow)
        self.expected = {name: p.data for name, p in self.module.named_parameters()}
        """The parameters of a hollow model, on the meta device."""
        if is_hollow:
            _empty(self.module)
        else:
            self.expected = {}
        self.module.to(self.device)
        packs = pack_weights and not is_hollow and can_pack(self.device, self.module.dtype)
        self._linears = PackedLinears(self.module) if packs else None
        text = self.module.config.get_text_config()
        self.limits = Limits(
            text.vocab_size, min(max_context or 2**31, text.max_position_embeddings)
        )
        self._parameters = dict(self.module.named_parameters())
        self._adapted = AdaptedLinears(self.module)
        self._nothing = {name: p.data for name, p in self._parameters.items() if is_hollow}
        self._lent: set[str] = set()
        """Parameters in the memory of the version that they came with."""
        is_cuda = self.device.type == "cuda"
        self._staging_stream = torch.cuda.Stream(self.device) if is_cuda else None
        self.kv_shape = _kv_shape(text, self.module.dtype, self.device)
        self.eos_ids = _eos_ids(self.module)

    @property
    def parameters(self) -> Mapping[str, torch.Size]:
        """Names and shapes that a version must bring."""
        return {name: parameter.shape for name, parameter in self._parameters.items()}

    def read(self, name: str) -> Tensor:
        """A copy of one parameter on the CPU; tied ones go by each of their names.

        Raises:
            DataError: there is none of this name.
        """
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        if name not in parameters:
            raise DataError(f"the model has no parameter {name!r}")
        return parameters[name].detach().cpu().clone()

    def fit(self, staged: StagedWeights) -> Fitted:
        """The same version as the model holds its weights, ready to be exchanged for them.

        Raises:
            SyncError: the GPU has no room for it.
        """
        try:
            tensors = self._placed(staged.tensors, self.device)
        except torch.cuda.OutOfMemoryError as error:
            if self._lent:
                raise SyncError(
                    f"no room on the GPU for version {staged.version}; lower backend.kv_cache_bytes"
                ) from error
            log.warning("no room for a second copy on the GPU: the swap will copy")
            tensors = self._placed(staged.tensors, torch.device("cpu"))
        packed = {} if self._linears is None else self._linears.pack(tensors)
        return Fitted(staged, tensors, packed)

    def exchange(self, fitted: Fitted) -> list[Tensor]:
        """Put a version in place.

        Returns:
            What it replaced. Freeing that much memory takes as long as copying it: let another
            thread do it.
        """
        replaced = [] if self._linears is None else self._linears.exchange(fitted.packed)
        for name, parameter in self._parameters.items():
            tensor = fitted.tensors[name]
            if tensor.device == parameter.device:
                replaced.append(parameter.data)
                parameter.data = tensor
                self._note_memory(name, tensor, fitted.held)
            else:
                assert name not in self._lent
                parameter.copy_(tensor)
        return replaced

    def fill(self, weights: Mapping[str, Tensor], adapter: Adapter | None) -> None:
        """Put weights into a hollow model, where they lie.

        Args:
            weights: all parameters, and A and B of the adapter's modules.
        Raises:
            SyncError: the adapter does not fit; the model stays hollow.
        """
        if adapter is not None:
            halves = {n: t for n, t in weights.items() if n not in self._parameters}
            self._adapted.put_in(adapter_pairs(halves, adapter), scale_of(adapter))
        for name, parameter in self._parameters.items():
            parameter.data = weights[name]

    def hollow(self) -> None:
        """Hold no weights any more."""
        self._adapted.take_out()
        for name, nothing in self._nothing.items():
            self._parameters[name].data = nothing

    def _note_memory(self, name: str, tensor: Tensor, held: StagedWeights) -> None:
        if tensor.data_ptr() == held.tensors[name].data_ptr():
            self._lent.add(name)
        else:
            self._lent.discard(name)

    def _placed(self, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """In a parameter's type each; on a GPU beside the stream in which tokens are computed."""
        with torch.cuda.stream(self._staging_stream):
            placed = {
                name: tensor.to(device, self._parameters[name].dtype).contiguous()
                for name, tensor in tensors.items()
            }
        if self._staging_stream is not None:
            self._staging_stream.synchronize()
        return placed

    def forward(
        self, ids: list[int], positions: list[int], wanted: list[int], spans: list[Span]
    ) -> Tensor:
        """One step.

        Args:
            ids, positions: [T] the tokens of the step, and where each stands in its sequence.
            wanted: places in the step whose logits are returned.
            spans: where the tokens lie in the cache.
        Returns:
            [len(wanted), V].
        """
        output = self.module(
            input_ids=torch.tensor([ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=self.device),
            use_cache=False,
            step=Step(spans, self.kv_shape.num_kv_heads, self.device),
        )
        logits: Tensor = output.logits[0]
        return logits

    def make_cache(self, config: EmbeddedTorchConfig) -> KVCache:
        """A cache within the configured memory; proves that the model runs on it, unless it is hollow.

        Raises:
            ConfigError: it does not hold one sequence, or the model does not fit this backend.
        """
        one = self.limits.max_context * self.kv_shape.token_bytes
        most = 2 * config.max_sequences * one
        budget = config.kv_cache_bytes or min(most, max(one, int(FREE_SHARE * self._free_bytes())))
        if budget < one:
            raise ConfigError(
                f"backend.kv_cache_bytes={budget} holds no sequence of {self.limits.max_context} "
                f"tokens; give at least {one}, or a smaller backend.max_context"
            )
        cache = KVCache(
            self.kv_shape, self.limits.max_context, budget, max_kept=config.max_sequences
        )
        if not self._nothing:
            self.probe(cache)
        return cache

    def probe(self, cache: KVCache) -> None:
        """Find out now, not on the first request, whether the model fits."""
        row = cache.allocate(2)
        if row is None:
            raise ConfigError("no room in the KV cache for two tokens")
        with torch.inference_mode():
            self.forward([0, 0], [0, 1], [1], [Span(row, 0, 2, 0)])
        row.length = 2
        cache.release(row, keep=False)

    def _free_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        return psutil.virtual_memory().available


def _load(config: ModelConfig, is_hollow: bool) -> Any:
    if config.attn_implementation != "sdpa":
        raise ConfigError(
            f"model.attn_implementation={config.attn_implementation} is for training; the embedded "
            "torch backend has an attention of its own: leave it out"
        )
    attention.register()
    load = hollow_model if is_hollow else load_model
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
