"""Versions that were written to cost a server its memory, its thread or its process.

Damage is `tests/contract/test_weight_damage.py`'s; here somebody knows the format, seals what he wrote,
and names the sizes. Each is refused by a clear error within seconds and a few MiB.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pydantic import ValidationError

from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import SyncError
from headway.contracts.http import paths
from headway.contracts.types import WeightUpdateMeta
from headway.runtime.secret import authorization
from tests.attack.stalls import without_stall
from tests.integration.conftest import model_dir  # noqa: F401 - a fixture
from tests.integration.guarded import GATEWAY, SECRETS, guarded_run
from weight_sync.deadline import Deadline
from weight_sync.manifest import MANIFEST_NAME, Adapter, Base, TensorEntry, content_digest
from weight_sync.receiver import make_receiver
from weight_sync.transports.disk import make_local_publisher

pytestmark = pytest.mark.extended

VERSION = 7
GIVEN = {"a.weight": torch.ones(8, 4), "b.weight": torch.ones(4)}
SHAPES = {name: tensor.shape for name, tensor in GIVEN.items()}
BLOB = "shard-00000.safetensors"
MAX_GROWTH_KIB = 128 << 10
LIMIT_S = 20.0
HUGE = 2 << 30
"""Bytes of a file with nothing in it: a machine may have the memory for it."""

Edit = Callable[[dict[str, Any]], Any]


def stranger(name: str, codec: str = "raw") -> dict[str, Any]:
    """An entry of a tensor of 2 GiB."""
    return {
        "name": name,
        "shape": [HUGE // 4],
        "dtype": "float32",
        "checksum": "0" * 32,
        "blob": BLOB,
        "size": HUGE,
        "codec": codec,
    }


def sealed(tree: dict[str, Any]) -> str:
    """The text of a manifest whose digest is right, if it can have one."""
    with suppress(ValidationError):
        entries = [TensorEntry.model_validate(entry) for entry in tree["tensors"]]
        base, adapter = tree.get("base"), tree.get("adapter")
        tree["digest"] = content_digest(
            tree["version"],
            entries,
            adapter and Adapter.model_validate(adapter),
            base and Base.model_validate(base),
        )
    return json.dumps(tree)


def first(**changes: Any) -> Edit:
    return lambda tree: tree["tensors"][0].update(changes)


EDITS: dict[str, Edit] = {
    "offset beyond 64 bits": first(offset=1 << 70),
    "offset of 63 bits": first(offset=(1 << 63) - 1),
    "size beyond 64 bits": first(size=1 << 70),
    "size of a sparse file": first(size=HUGE),
    "size of a sparse file, compressed": first(size=HUGE, codec="dense"),
    "size of a sparse file, quantized": first(size=HUGE, codec="int8"),
    "dimension beyond 64 bits": first(shape=[1 << 70, 4]),
    "dimensions without number": first(shape=[1] * 100_000),
    "negative dimensions": first(shape=[-8, -4]),
    "version beyond 64 bits": lambda tree: tree.update(version=1 << 70),
    "a tensor twice": lambda tree: tree["tensors"].append(tree["tensors"][0]),
    "a tensor twice, other values": lambda tree: tree["tensors"].append(
        {**tree["tensors"][1], "name": tree["tensors"][0]["name"]}
    ),
    "a huge stranger": lambda tree: tree["tensors"].append(stranger("c.weight")),
    "a huge stranger that differs": lambda tree: tree["tensors"].append(
        stranger("c.weight", "sparse")
    ),
    "a huge buffer": lambda tree: tree["tensors"].append(stranger("x.rotary_emb.inv_freq")),
    "a way out": first(blob="../v00000006/" + BLOB),
    "a way out in Windows' words": first(blob="..\\secret"),
    "a blob that is the manifest": first(blob=MANIFEST_NAME),
    "a blob that is a folder": first(blob="folder"),
    "a blob that is a pipe": first(blob="pipe"),
    "a base for ever": lambda tree: tree.update(
        kind="delta", base={"version": 6, "digest": "0" * 64}
    ),
    "an absurd rank": lambda tree: tree.update(
        kind="adapter",
        base={"version": 6, "digest": "0" * 64},
        adapter={"rank": 1 << 60, "alpha": 1e308},
    ),
    "an adapter of huge matrices": lambda tree: tree.update(
        kind="adapter",
        base={"version": 6, "digest": "0" * 64},
        adapter={"rank": 1, "alpha": 1.0},
        tensors=[stranger("a.lora_A.weight"), stranger("a.lora_B.weight")],
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good version, with things beside it that no version has."""
    publisher = make_local_publisher(str(tmp_path))
    publisher.publish(VERSION, GIVEN.items())
    publisher.close()
    folder = tmp_path / "v00000007"
    os.truncate(folder / BLOB, HUGE)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    return folder


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture
def bounded() -> Iterator[None]:
    """Neither much memory nor much time."""
    before, began = peak_kib(), time.monotonic()
    yield
    assert peak_kib() - before < MAX_GROWTH_KIB
    assert time.monotonic() - began < LIMIT_S


def stage(folder: Path, shapes: dict[str, torch.Size] = SHAPES) -> None:
    receiver = make_receiver(ReceiverConfig(allow=(str(folder.parent),)))
    try:
        receiver.within(Deadline(LIMIT_S)).stage(WeightUpdateMeta(VERSION, str(folder)), shapes)
    finally:
        receiver.close()


def test_what_is_beside_a_version_is_no_part_of_it(folder: Path, bounded: None) -> None:
    stage(folder)


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_hostile_manifest_is_refused(folder: Path, bounded: None, edit: Edit) -> None:
    file = folder / MANIFEST_NAME
    tree = json.loads(file.read_text())
    edit(tree)
    file.write_text(sealed(tree))
    with pytest.raises(SyncError) as caught:
        stage(folder)
    assert len(caught.value.message) < 1_000


@pytest.mark.parametrize("name", [MANIFEST_NAME, BLOB])
@pytest.mark.parametrize("kind", ["pipe", "folder", "huge"])
def test_a_file_that_is_none_is_refused(folder: Path, bounded: None, name: str, kind: str) -> None:
    if (name, kind) == (BLOB, "huge"):
        return
    file = folder / name
    file.unlink()
    if kind == "huge":
        file.touch()
        os.truncate(file, HUGE)
    else:
        (folder / kind).rename(file)
    with pytest.raises(SyncError):
        stage(folder)


def test_a_chain_without_end_is_refused(tmp_path: Path, bounded: None) -> None:
    """Each version names the one before it as its base."""
    source = tmp_path / "source"
    publisher = make_local_publisher(str(source))
    publisher.publish(VERSION, GIVEN.items())
    publisher.close()
    tree = json.loads((source / "v00000007" / MANIFEST_NAME).read_text())
    last = 2_000
    for version in range(1, last + 1):
        tree.update(
            version=version, kind="delta", base={"version": version - 1, "digest": "0" * 64}
        )
        folder = tmp_path / f"v{version:08d}"
        folder.mkdir()
        (folder / MANIFEST_NAME).write_text(sealed(tree))
    receiver = make_receiver(ReceiverConfig(allow=(str(tmp_path),)))
    with pytest.raises(SyncError, match="builds on"):
        receiver.within(Deadline(LIMIT_S)).stage(
            WeightUpdateMeta(last, str(tmp_path / f"v{last:08d}")), SHAPES
        )
    receiver.close()


SERVED = (
    "a tensor twice",
    "a blob that is a pipe",
    "size of a sparse file",
    "a way out",
    "a base for ever",
    "dimensions without number",
)


def test_a_server_that_is_told_of_them_goes_on(
    folder: Path,
    tmp_path: Path,
    model_dir: Path,  # noqa: F811
) -> None:
    file = folder / MANIFEST_NAME
    good = file.read_text()
    with guarded_run(tmp_path / "run", model_dir, allow=(str(tmp_path),)) as guarded:

        def publish(version: int) -> httpx.Response:
            body = {"version": version, "path": str(folder)}
            return guarded.ask(GATEWAY, "POST", paths.WEIGHTS, json=body)

        def attack() -> None:
            for name in SERVED:
                tree = json.loads(good)
                EDITS[name](tree)
                file.write_text(sealed(tree))
                answer = publish(VERSION)
                assert (answer.status_code, answer.json()["code"]) == (409, "sync"), answer.text
            file.unlink()
            os.mkfifo(file)
            assert publish(VERSION).json()["code"] == "sync"
            file.unlink()

        without_stall(attack, *guarded.urls.values(), headers=authorization(SECRETS["admin"]))
        assert guarded.is_alive()
        file.write_text(good)
        assert publish(VERSION).json()["version"] == VERSION
