"""Every transport under test behind one object, and weights of all kinds to send through it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pytest
import torch
from pydantic import TypeAdapter

from headway.contracts.config.weight_sync import ReceiverConfig, WeightSyncConfig
from headway.contracts.errors import SyncError
from headway.contracts.types import GroupRank, PolicyVersion, WeightUpdateMeta
from weight_sync.channel import StagedWeights, WeightPublisher
from weight_sync.deadline import Deadline
from weight_sync.manifest import MANIFEST_NAME, TensorEntry, content_digest
from weight_sync.receiver import Receiver, make_receiver
from weight_sync.transports.base import make_publisher

LIMIT_S = 60.0
"""For anything to happen; reaching it is a failure of the test, not of what is tested."""
VERSION = 7

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, torch.Size]


@dataclass(frozen=True)
class Kind:
    """One transport, and what its medium can and cannot do."""

    name: str
    section: dict[str, object]
    is_kept: bool = True
    """A stored version: a late receiver reads it, and reads it again."""
    is_folder: bool = True
    """It lies in a directory of this machine, which one publisher owns."""
    in_memory: bool = False
    """The directory has to be on a tmpfs."""


KINDS = (
    Kind("disk", {"type": "disk"}),
    Kind("file-url", {"type": "disk"}),
    Kind("object-store", {"type": "disk"}, is_folder=False),
    Kind("shared-memory", {"type": "shared_memory"}, in_memory=True),
    Kind("http", {"type": "http"}),
    Kind(
        "ipc",
        {"type": "collective", "backend": "ipc", "timeout_s": 30.0},
        is_kept=False,
        is_folder=False,
    ),
    Kind("collective", {"type": "collective", "timeout_s": 30.0}, is_kept=False, is_folder=False),
)


def on(*wanted: str) -> pytest.MarkDecorator:
    """Run a test with the kinds that have these flags."""
    kinds = [kind for kind in KINDS if all(getattr(kind, flag) for flag in wanted)]
    return pytest.mark.parametrize("channel", kinds, indirect=True, ids=lambda kind: kind.name)


every = on()
kept = on("is_kept")
in_folders = on("is_folder")


class Channel:
    """Both ends of one transport; use it as a context."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self._stack = ExitStack()
        self._threads = self._stack.enter_context(ThreadPoolExecutor(8))
        if kind.in_memory:
            folder = Path(tempfile.mkdtemp(prefix="headway-test-", dir="/dev/shm"))
            self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self._stack.callback(self.close_publishers)
        self.folder = folder / "weights"
        self._root = {
            "object-store": f"memory://{folder.name}-{os.getpid()}/weights",
            "file-url": f"file://{self.folder}",
        }.get(kind.name, str(self.folder))
        self._epoch = 0
        self._publishers: list[WeightPublisher] = []

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def config(self, **options: object) -> Any:
        """The section of a run's configuration."""
        root = {"root": self._root} if self.kind.is_kept else {}
        section = {**self.kind.section, **root, **options}
        return TypeAdapter(WeightSyncConfig).validate_python(section)

    def publisher(self, **options: object) -> WeightPublisher:
        """The trainer's end; shards of 1 MiB unless told otherwise."""
        config = self.config(**{"shard_bytes": 1 << 20, **options})
        publisher = make_publisher(config)
        self._publishers.append(publisher)
        return publisher

    def close_publishers(self) -> None:
        """As at the end of a trainer."""
        while self._publishers:
            self._publishers.pop().close()

    def restarted(self, meta: WeightUpdateMeta) -> WeightPublisher:
        """Another publisher after the end of the first, under the address that servers know."""
        self.close_publishers()
        port = {"port": urlsplit(meta.path).port} if self.kind.name == "http" else {}
        return self.publisher(**port)

    def receiver(self, **options: object) -> Receiver:
        """A server's end that takes versions from here."""
        config = ReceiverConfig(**{"allow": (self.config().origin,), **options})
        receiver = make_receiver(config)
        self._stack.callback(receiver.close)
        return receiver

    def transfer(
        self,
        publisher: WeightPublisher,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        shapes: Shapes,
        receivers: int | list[Receiver] = 1,
    ) -> tuple[WeightUpdateMeta, list[StagedWeights]]:
        """Publish to servers that were armed first."""
        if isinstance(receivers, int):
            receivers = [self.receiver() for _ in range(receivers)]
        metas = self.seated(publisher.announce(version), len(receivers))
        staging = [
            self.start(stage, receiver, meta, shapes)
            for receiver, meta in zip(receivers, metas, strict=True)
        ]
        meta = publisher.publish(version, tensors)
        return meta, [future.result(LIMIT_S) for future in staging]

    def seated(self, meta: WeightUpdateMeta, count: int) -> list[WeightUpdateMeta]:
        """What each of `count` servers is told."""
        self._epoch += 1
        return [
            WeightUpdateMeta(
                meta.version,
                meta.path,
                meta.digest,
                group_rank=GroupRank(self._epoch, rank, count + 1),
            )
            for rank in range(1, count + 1)
        ]

    def start(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Work in a thread."""
        return self._threads.submit(work, *args)

    def files(self, version: int = VERSION) -> Files:
        """A kept version, to be tampered with."""
        if self.kind.is_folder:
            return Files("file", str(self.folder / f"v{version:08d}"))
        return Files("memory", f"{self._root.removeprefix('memory:/')}/v{version:08d}")


class Files:
    """The files of one version behind fsspec."""

    def __init__(self, protocol: str, folder: str) -> None:
        self._fs = fsspec.filesystem(protocol)
        self._folder = folder

    def names(self) -> list[str]:
        if not self._fs.exists(self._folder):
            return []
        paths = self._fs.ls(self._folder, detail=False)
        return sorted(str(path).rpartition("/")[2] for path in paths)

    def read(self, name: str) -> bytes:
        return self._fs.cat_file(f"{self._folder}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Texts come at once and whole; blobs stay the files that they are."""
        if name.endswith(".json"):
            self._fs.pipe_file(f"{self._folder}/.new", content)
            self._fs.mv(f"{self._folder}/.new", f"{self._folder}/{name}")
        else:
            self._fs.pipe_file(f"{self._folder}/{name}", content)

    def delete(self, name: str) -> None:
        self._fs.rm_file(f"{self._folder}/{name}")

    def manifest(self) -> Any:
        return json.loads(self.read(MANIFEST_NAME))

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies."""
        found = [entry for entry in self.manifest()["tensors"] if entry["name"] == name]
        return TensorEntry.model_validate(found[0])

    def flip(self, name: str, position: int = 0) -> None:
        """Damage one bit of a tensor."""
        entry = self.entry(name)
        content = bytearray(self.read(entry.blob))
        content[entry.offset + position] ^= 1
        self.write(entry.blob, bytes(content))

    def edit_manifest(self, edit: Callable[[Any], object], is_resealed: bool = False) -> None:
        """Change the manifest's fields; resealed = with a digest that fits again."""
        tree = self.manifest()
        edit(tree)
        if is_resealed:
            entries = [TensorEntry.model_validate(entry) for entry in tree["tensors"]]
            tree["digest"] = content_digest(tree["version"], entries)
        self.write(MANIFEST_NAME, json.dumps(tree).encode())


def stage(
    receiver: Receiver,
    meta: WeightUpdateMeta,
    shapes: Mapping[str, torch.Size],
    deadline: Deadline | None = None,
) -> StagedWeights:
    """What a server does when it is told of a version."""
    return receiver.within(deadline or Deadline(LIMIT_S)).stage(meta, shapes)


def weights(seed: int = 0, num_big: int = 3) -> Tensors:
    """Tensors of all kinds; each `big` fills a shard."""
    random = torch.Generator().manual_seed(seed)
    shared = torch.randn(4, 6, generator=random)
    return {
        "odd.bf16": torch.randn(3, 5, 7, generator=random).bfloat16(),
        "matrix": torch.randn(16, 24, generator=random),
        "one.half": torch.randn(1, generator=random).half(),
        "empty": torch.empty(0, 4),
        "scalar": torch.randn((), generator=random),
        "bits": torch.tensor([0x7F000123, -0x7FFFFFFF, 1], dtype=torch.int32).view(torch.float32),
        "special": torch.tensor([-0.0, 3e38, 3e38, 1e-45]),
        "grad": torch.nn.Parameter(torch.randn(9, generator=random)),
        "transposed": torch.randn(6, 4, generator=random).t(),
        "shared": shared,
        "shared.row": shared[1],
    } | {f"big.{i}": torch.randn(1 << 18, generator=random) for i in range(num_big)}


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    return {name: tensor.shape for name, tensor in tensors.items()}


def assert_equal_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape), name
        assert bits(tensor) == bits(right[name]), name


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Midway:
    """Tensors of which the last one comes when it is told; says when the first have gone."""

    def __init__(self, tensors: Tensors, error: Exception | None = None) -> None:
        self._tensors = tensors
        self._error = error
        self.reached = threading.Event()
        self.goes_on = threading.Event()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        *first, last = self._tensors.items()
        yield from first
        self.reached.set()
        assert self.goes_on.wait(LIMIT_S)
        if self._error is not None:
            raise self._error
        yield last


def refusal(reason: str) -> Future[PolicyVersion]:
    """Return the decision of a service that does not want a version."""
    decision: Future[PolicyVersion] = Future()
    decision.set_exception(SyncError(reason))
    return decision
