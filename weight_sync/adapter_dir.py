"""An adapter from a directory that `peft` wrote."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from headway.contracts.errors import ConfigError, SyncError
from headway.runtime.model_files import check_regular, read_object
from weight_sync.adapter import CONFIG_NAME, make_adapter
from weight_sync.manifest import Adapter

WEIGHTS_NAME = "adapter_model.safetensors"


def read_adapter(folder: Path) -> tuple[dict[str, Tensor], Adapter]:
    """Return the matrices, named as `peft` does, and what else there is to know.

    Raises:
        SyncError: it is no plain LoRA, or damaged.
    """
    file = folder / WEIGHTS_NAME
    try:
        adapter = make_adapter(read_object(folder / CONFIG_NAME))
        check_regular(file)
        return load(file.read_bytes()), adapter  # not mapped: the file may be written over
    except (OSError, SafetensorError, ConfigError) as error:
        raise SyncError(f"no adapter can be read from {folder}: {error}") from error
