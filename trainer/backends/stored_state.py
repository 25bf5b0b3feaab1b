"""A stored state, looked at before any of it is loaded: loading overwrites parameters one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from headway.contracts.errors import ConfigError, StateError

SHOWN = 3
"""Misfits that a message names."""


def check_stored(path: str, wanted: Mapping[str, Any]) -> None:
    """Raise unless a state can be loaded whole.

    Args:
        wanted: `model`, and what else is loaded.
    Raises:
        ConfigError: there is none, or it is of another model.
        StateError: files of it are missing or truncated.
    """
    if not Path(path).is_dir():
        raise ConfigError(f"there is no checkpoint at {path}; name a directory that holds one")
    metadata = _metadata(path)
    misfits = list(_misfits(metadata, wanted))
    if misfits:
        more = f"; and {len(misfits) - SHOWN} more" if len(misfits) > SHOWN else ""
        raise ConfigError(
            f"checkpoint {path} does not fit the model: {'; '.join(misfits[:SHOWN])}{more}. Set the "
            "model section to what it was saved with"
        )
    for file, size in _sizes(metadata).items():
        _check_file(path, file, size)


def damaged(path: str, what: object) -> StateError:
    """The error of a checkpoint that cannot be read."""
    return StateError(f"checkpoint {path} is damaged: {what}; delete it to use an older one")


def _metadata(path: str) -> Metadata:
    try:
        return FileSystemReader(path).read_metadata()
    except FileNotFoundError as error:
        raise damaged(path, "it has no .metadata, which is written last") from error
    except (OSError, EOFError, UnpicklingError, AttributeError, ValueError, IndexError) as error:
        raise damaged(path, f".metadata cannot be read ({error})") from error


def _misfits(metadata: Metadata, wanted: Mapping[str, Any]) -> Iterator[str]:
    stored = metadata.state_dict_metadata
    for name, tensor in wanted["model"].items():
        entry = stored.get(f"model.{name}")
        if not isinstance(entry, TensorStorageMetadata):
            yield f"it lacks {name}"
        elif _kind(entry.size, entry.properties.dtype) != _kind(tensor.shape, tensor.dtype):
            yield (
                f"{name} is {_kind(entry.size, entry.properties.dtype)} there and "
                f"{_kind(tensor.shape, tensor.dtype)} here"
            )
    names = (key.removeprefix("model.") for key in stored if key.startswith("model."))
    yield from (f"it also holds {name}" for name in names if name not in wanted["model"])
    if "optimizer" in wanted and not any(key.startswith("optimizer.") for key in stored):
        yield "it holds weights without an optimizer"


def _kind(shape: Any, dtype: Any) -> str:
    return f"{dtype}{list(shape)}".removeprefix("torch.")


def _sizes(metadata: Metadata) -> dict[str, int]:
    """Files and the bytes that each has at least."""
    sizes: dict[str, int] = {}
    for part in metadata.storage_data.values():
        end = part.offset + part.length
        sizes[part.relative_path] = max(end, sizes.get(part.relative_path, 0))
    return sizes


def _check_file(path: str, file: str, wanted: int) -> None:
    try:
        size = (Path(path) / file).stat().st_size
    except OSError as error:
        raise damaged(path, f"{file} is missing") from error
    if size < wanted:
        raise damaged(path, f"{file} has {size} of {wanted} bytes")
