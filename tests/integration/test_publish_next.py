"""A trainer of one's own that publishes by the recipe of docs/weights/your-trainer.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.model import ModelConfig
from headway.contracts.errors import SyncError
from headway.contracts.types import ConsumerSpec
from headway.launch.launchers.local import LocalRun
from tests.contract.pages import ROOT, examples_of
from weight_sync.model_dir import load_model

PAGE = ROOT / "docs" / "weights" / "your-trainer.md"


def test_a_refused_version_does_not_block_the_next_one(
    make_config: Callable[..., LaunchConfig],
    start: Callable[[LaunchConfig], LocalRun],
    model_dir: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = start(make_config())
    recipe, _ = [block.text for block in examples_of(PAGE, "python")]
    recipe = recipe.replace("http://127.0.0.1:8000", run.url)
    names: dict[str, Any] = {"model": load_model(ModelConfig(path=str(model_dir)))}
    exec(recipe.replace("/shared/weights", str(tmp_path / "weights")), names)
    assert names["version"] == 1

    def publish(tensors: Any) -> int:
        return int(names["publish_next"](names["publisher"], names["servers"], tensors))

    with pytest.raises(SyncError, match="version 2 was not committed, 1 goes on serving"):
        publish({"of another model": torch.ones(3)}.items())
    weights = dict(names["model"].named_parameters())
    name = next(iter(weights))
    with pytest.raises(SyncError, match=f"values of {name} are NaN or infinite"):
        publish({**weights, name: weights[name] * torch.nan}.items())
    assert publish(weights.items()) == 3
    servers = names["servers"]
    assert servers.status().version == 3
    servers.attach(ConsumerSpec("another-run", 1, 1, -1, 0))
    assert "servers have version 3, newer than version 0 of consumer 'another-run'" in caplog.text
    caplog.clear()
    servers.attach(ConsumerSpec("another-run", 1, 1, -1, 3))  # at once: it crashed, and comes again
    assert not caplog.text
    servers.destroy()
    names["publisher"].close()
