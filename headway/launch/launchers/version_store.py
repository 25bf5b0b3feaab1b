"""Default store for the versions of a run on one machine: shared memory, or disk."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

from headway.contracts.config.launch import SHARED_MEMORY, LaunchConfig, shared_root
from headway.contracts.config.weight_sync import DiskSync, SharedMemorySync

VERSIONS = 3
"""The committed one, the one that arrives, and one that a server still serves."""
BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}


def place_versions(config: LaunchConfig) -> tuple[LaunchConfig, str | None]:
    """Use the disk where shared memory cannot hold the versions of a run.

    Returns:
        The configuration, and one line for the user if it was changed. What a configuration names
        itself stays as it is.
    """
    sync, run_dir = config.trainer.weight_sync, config.trainer.run_dir
    if not isinstance(sync, SharedMemorySync) or sync.root != shared_root(run_dir):
        return config, None
    problem = _problem(_version_bytes(config), Path(SHARED_MEMORY))
    if problem is None:
        return config, None
    root = str(Path(run_dir) / "weights")
    disk = DiskSync(**sync.model_dump(exclude={"type", "root"}), root=root)
    trainer = config.trainer.model_copy(update={"weight_sync": disk})
    line = f"weights go over the disk ({root}), not over shared memory: {problem}"
    return config.model_copy(update={"trainer": trainer}), line


def discard_versions(config: LaunchConfig) -> None:
    """Free the shared memory of a run; a resumed one publishes its weights again."""
    sync, root = config.trainer.weight_sync, shared_root(config.trainer.run_dir)
    if isinstance(sync, SharedMemorySync) and sync.root == root:
        shutil.rmtree(root, ignore_errors=True)


def _problem(version_bytes: int | None, folder: Path) -> str | None:
    """Return why a folder cannot hold versions; None if it can."""
    if not folder.is_dir():
        return f"there is no {folder}"
    if version_bytes is None:
        return "the size of a version is not known before the model is made"
    free, wanted = shutil.disk_usage(folder).free, VERSIONS * version_bytes
    if free >= wanted:
        return None
    return (
        f"{folder} has {_mebibytes(free)} MiB free, {VERSIONS} versions take "
        f"{_mebibytes(wanted)} MiB"
    )


def _version_bytes(config: LaunchConfig) -> int | None:
    """Size of a published version in bytes, by the model's files; None if they do not show it."""
    dtype = config.trainer.weight_sync.dtype or config.trainer.model.dtype
    files = sorted(Path(config.trainer.model.path).glob("*.safetensors"))
    try:
        num_parameters = sum(map(_num_parameters, files))
    except (OSError, SafetensorError):
        return None
    return num_parameters * BYTES_OF_DTYPE.get(dtype, 4) or None


def _num_parameters(file: Path) -> int:
    with safe_open(file, framework="numpy") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


def _mebibytes(count: int) -> int:
    return -(-count >> 20)
