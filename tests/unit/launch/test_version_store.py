import hashlib
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headway.contracts.config.launch import LaunchConfig, shared_root
from headway.contracts.config.weight_sync import DiskSync, HttpSync, SharedMemorySync
from headway.contracts.errors import ConfigError
from headway.launch.launchers import version_store
from headway.launch.launchers.version_store import discard_versions, place_versions
from headway.runtime.config import validate_config

NUM_PARAMETERS = 3 * 1000
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {"a": np.zeros((1000,), np.float32), "b": np.zeros((2, 1000), np.float16)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def configure(model: Path, **weight_sync: object) -> LaunchConfig:
    trainer: dict[str, object] = {
        "run_dir": str(model.parent / "run"),
        "data": {"path": "rows.jsonl", "batch_size": 1},
        "rollout": {"reward": {"name": "exact"}},
    }
    if weight_sync:
        trainer["weight_sync"] = weight_sync
    tree = {"model": str(model), "gateway": {}, "server": {}, "trainer": trainer}
    return validate_config(LaunchConfig, tree)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    def set_free(count: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, count))

    return set_free


def test_a_run_that_names_no_place_shares_memory(model, free):
    free(1 << 30)
    config, changed = place_versions(configure(model))
    sync = config.trainer.weight_sync
    run_dir = str((model.parent / "run").resolve())
    assert sync.root == f"/dev/shm/headway-{hashlib.sha256(run_dir.encode()).hexdigest()[:12]}"
    assert isinstance(sync, SharedMemorySync) and sync.keep == 1 and changed is None


def test_settings_without_a_place_are_kept(model, free):
    free(1 << 30)
    config, _ = place_versions(configure(model, dtype="bfloat16", keep=2))
    sync = config.trainer.weight_sync
    assert (sync.type, sync.dtype, sync.keep) == ("shared_memory", "bfloat16", 2)


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("bfloat16", 2)], ids=["float32", "bfloat16"]
)
def test_the_disk_takes_what_shared_memory_cannot_hold(model, free, dtype, size):
    wanted = 3 * NUM_PARAMETERS * size
    free(wanted)
    assert place_versions(configure(model, dtype=dtype))[1] is None
    free(wanted - 1)
    config, changed = place_versions(configure(model, dtype=dtype))
    sync = config.trainer.weight_sync
    assert isinstance(sync, DiskSync) and sync.root == str(model.parent / "run" / "weights")
    assert (sync.dtype, sync.keep) == (dtype, 1)
    assert changed is not None and "\n" not in changed
    assert "/dev/shm has 1 MiB free, 3 versions take 1 MiB" in changed


def test_a_model_that_is_not_made_yet_goes_over_the_disk(model, free):
    free(1 << 40)
    (model / "model.safetensors").unlink()
    config, changed = place_versions(configure(model))
    assert config.trainer.weight_sync.type == "disk"
    assert changed is not None and "not known before the model is made" in changed


def test_a_machine_without_shared_memory_uses_the_disk(model, monkeypatch):
    config = configure(model)
    monkeypatch.setattr(version_store, "SHARED_MEMORY", str(model / "none"))
    assert place_versions(config)[0].trainer.weight_sync.type == "disk"


@pytest.mark.parametrize(
    "named",
    [
        {"root": "weights"},
        {"type": "http", "root": "weights"},
        {"type": "shared_memory", "root": "/dev/shm/mine"},
    ],
)
def test_a_place_that_is_named_stays(model, free, named):
    free(0)
    config = configure(model, **named)
    assert place_versions(config) == (config, None)
    kinds = {"disk": DiskSync, "http": HttpSync, "shared_memory": SharedMemorySync}
    assert isinstance(config.trainer.weight_sync, kinds[named.get("type", "disk")])


def test_only_memory_of_the_run_itself_is_freed(model, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    discard_versions(configure(model, type="shared_memory", root=str(mine)))
    assert mine.is_dir()
    own = Path(shared_root(str(model.parent / "run")))
    own.mkdir()
    discard_versions(configure(model))
    assert not own.exists()


def test_what_a_run_chooses_itself_is_not_asked_for():
    with pytest.raises(ConfigError) as caught:
        validate_config(LaunchConfig, {})
    assert "--trainer.model.path VALUE --trainer.data.path VALUE" in caught.value.message
    assert "weight-sync" not in caught.value.message
