from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headway.contracts.types import WeightUpdateMeta
from weight_sync.transports.disk import DiskPublisher, DiskReader

WEIGHTS = {
    "embed.weight": torch.arange(12, dtype=torch.float32).reshape(4, 3) / 7,
    "layer.0.bias": torch.tensor([1e-30, -0.0, 3.4e38]),
    "scale": torch.tensor(0.1),
    "empty": torch.empty(0, 3),
}
SHAPES = {name: tensor.shape for name, tensor in WEIGHTS.items()}


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in WEIGHTS.items()}


@pytest.fixture
def shapes() -> dict[str, torch.Size]:
    return dict(SHAPES)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def make_publisher(root: Path) -> Callable[..., DiskPublisher]:
    def made(keep: int = 3, shard_bytes: int = 1 << 20, dtype: str | None = None) -> DiskPublisher:
        return DiskPublisher(str(root), keep, shard_bytes, dtype)

    return made


@pytest.fixture
def published(make_publisher, weights) -> WeightUpdateMeta:
    """Version 7, one tensor per shard."""
    return make_publisher(shard_bytes=1).publish(7, weights.items())


@pytest.fixture
def reader(root: Path) -> DiskReader:
    return DiskReader(str(root))
