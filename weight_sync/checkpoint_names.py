"""Parameters of a model as its checkpoints name them.

transformers holds the experts of a layer in one tensor; checkpoints, SGLang and vLLM have a tensor for
each expert. Versions are published in the form of checkpoints, which every engine reads; transformers
converts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    rename_source_key,
    revert_weight_conversion,
)

from weight_sync.channel import NamedTensors


class CheckpointNames:
    """Names and shapes in the checkpoint of one model; for most models they are its parameters'."""

    def __init__(self, model: Any) -> None:
        """
        Args:
            model: of transformers; its parameters may be sharded, or on the meta device.
        """
        self._model = model
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        self._converters = [each for each in conversions if isinstance(each, WeightConverter)]
        self._renamings = [each for each in conversions if not isinstance(each, WeightConverter)]
        self._parts = {name: self._parts_of(name, p.shape) for name, p in model.named_parameters()}
        self.shapes = {
            part: shape for parts in self._parts.values() for part, shape in parts.items()
        }
        """Shape of each tensor that a version contains."""
        self._owners = {part: name for name, parts in self._parts.items() for part in parts}

    def split(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters under the names of the checkpoint; names that the model has not stay."""
        for name, tensor in tensors:
            if self._is_same(name):
                yield name, tensor
            else:
                yield from self._reverted(name, tensor).items()

    def merge(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the model's parameters from all tensors of a version; not copied where the names are the
        same."""
        if not self._converters:
            return tensors
        return {
            name: tensors[name] if self._is_same(name) else self._merged(name, tensors)
            for name in self._parts
        }

    def read(self, name: str, parameters: Mapping[str, Tensor]) -> Tensor | None:
        """Return a tensor of the checkpoint from the parameters; None if there is none of this name."""
        owner = self._owners.get(name, name)
        if owner not in parameters:
            return None
        return dict(self.split([(owner, parameters[owner])])).get(name)

    def _is_same(self, name: str) -> bool:
        return name in self._parts.get(name, (name,))

    def _parts_of(self, name: str, shape: torch.Size) -> dict[str, torch.Size]:
        if not self._converters:
            return {name: shape}
        whole = torch.empty(shape, device="meta")
        return {part: tensor.shape for part, tensor in self._reverted(name, whole).items()}

    def _reverted(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        reverted: dict[str, Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return reverted

    def _merged(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        converting: WeightConverter | None = None
        for part in self._parts[name]:
            target, pattern = rename_source_key(part, self._renamings, self._converters)
            if pattern is None:  # it only has another name
                return tensors[part]
            if converting is None:
                converting = deepcopy(
                    next(each for each in self._converters if pattern in each.source_patterns)
                )
            converting.add_tensor(target, part, pattern, tensors[part])
        assert converting is not None
        converted = converting.convert(name, model=self._model, config=self._model.config)
        merged: Tensor = converted[name]
        return merged
