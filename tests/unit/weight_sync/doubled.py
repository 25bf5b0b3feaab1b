"""Weights of a device that is not there, on their ways out and in; run each in a process of its own."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.weight_sync import DiskSync, ReceiverConfig
from headway.contracts.types import WeightUpdateMeta
from inference_server.backends.embedded.device import Accelerator
from inference_server.backends.embedded.model import EmbeddedModel
from tests.processes import FORKS
from weight_sync.buffers import Buffers
from weight_sync.channel import StagedWeights
from weight_sync.codecs import decode
from weight_sync.deadline import Deadline
from weight_sync.device_copy import snapshot
from weight_sync.manifest import Manifest, TensorEntry, has_checksum, make_manifest
from weight_sync.published_tensors import buckets, outgoing
from weight_sync.publisher import StoredPublisher
from weight_sync.receiver import Reader, make_receiver
from weight_sync.store import Announcement
from weight_sync.transports.broadcast_buckets import ON_DEVICE, BucketQueue, SendBuffers, pack
from weight_sync.transports.collective_source import room_for
from weight_sync.transports.disk import LocalStore
from weight_sync.transports.handles import allocate, retire
from weight_sync.transports.process_group import GroupAddress, WeightGroup
from weight_sync.transports.rendezvous import BucketHeader
from weight_sync.weight_transfer import GeneratorWeights, TransferredTensor

LIMIT_S = 60.0
LAYERS, HIDDEN, BUCKET_BYTES = 28, 64, 1 << 20
ADDRESS = GroupAddress("g", "127.0.0.1", 1, 0, 2, "gloo")

Figures = dict[str, Any]


def on_double(work: Callable[..., Figures], *args: object) -> Figures:
    """Run one of the functions below in a process that may have the device double; what it found."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_tell, args=(theirs, work, args), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(LIMIT_S), "the process gave no answer"
        found = ours.recv()
    finally:
        process.kill()
        process.join(LIMIT_S)
        ours.close()
    assert isinstance(found, dict), found
    return found


def _tell(pipe: Connection, work: Callable[..., Figures], args: tuple[object, ...]) -> None:
    try:
        pipe.send(work(*args))
    except BaseException:  # noqa: BLE001 - the test's to show
        pipe.send(traceback.format_exc())


def model(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """28 layers of nine tensors, and three more."""
    random = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (1000, HIDDEN), "norm.weight": (HIDDEN,), "head": (1000, HIDDEN)}
    for layer in range(LAYERS):
        for part, rows in zip("qkvo", (64, 32, 32, 64), strict=True):
            shapes[f"layers.{layer}.{part}"] = (rows, HIDDEN)
        for part in ("gate", "up"):
            shapes[f"layers.{layer}.{part}"] = (3 * HIDDEN, HIDDEN)
        shapes[f"layers.{layer}.down"] = (HIDDEN, 3 * HIDDEN)
        shapes |= {f"layers.{layer}.norm{i}": (HIDDEN,) for i in range(2)}
    return {n: torch.randn(s, generator=random).to(dtype) for n, s in shapes.items()}


def num_buckets(dtype: torch.dtype) -> int:
    return len(list(buckets(iter(model(dtype).items()), BUCKET_BYTES)))


def hops(double: Any) -> Figures:
    """What was logged, as figures."""
    found: dict[tuple[str, str], list[int]] = {}
    for way, dtype, size in double.transfers:
        found.setdefault((way, dtype), []).append(size)
    return {
        "transfers": {key: (len(sizes), sum(sizes)) for key, sizes in found.items()},
        "syncs": len(double.syncs),
        "mixed": list(double.mixed),
    }


def store(folder: str) -> Figures:
    """Publish float32 masters of the device as bfloat16 into a store, and read them back."""
    from tests.device_double import DeviceDouble

    double, given = DeviceDouble(), model()
    config = DiskSync(root=folder, dtype="bfloat16", shard_bytes=BUCKET_BYTES)
    publisher = StoredPublisher(LocalStore(folder), config)
    with double:
        meta = publisher.publish(7, [(name, double.tensor(t)) for name, t in given.items()])
    publisher.close()
    metrics = hops(double)
    staged = _staged(folder, meta, given)
    metrics["equal"] = all(torch.equal(staged[n], t.bfloat16()) for n, t in given.items())
    return metrics


def _staged(folder: str, meta: Any, given: dict[str, torch.Tensor]) -> Any:
    receiver = make_receiver(ReceiverConfig(allow=(str(Path(folder).resolve()),)))
    shapes = {name: tensor.shape for name, tensor in given.items()}
    return receiver.within(Deadline(LIMIT_S)).stage(meta, shapes).tensors


class _Wire:
    """A group whose broadcasts go nowhere; remembers what they were given."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []

    def broadcast(self, buffer: torch.Tensor, root: int) -> _Wire:
        self.sent.append((buffer.device.type, buffer.nbytes))
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None: ...


def broadcast() -> Figures:
    """Pack and send float32 masters as bfloat16 from the device, twice as after a death."""
    from tests.device_double import DEVICE, DeviceDouble

    double, given, wire = DeviceDouble(), model(), _Wire()
    config = DiskSync(root="-", dtype="bfloat16")
    group, staging, bucket_queue = (
        WeightGroup(ADDRESS, wire, LIMIT_S, DEVICE),
        SendBuffers(),
        BucketQueue(),
    )
    with double:
        tensors = [(name, double.tensor(t)) for name, t in given.items()]
        for number, bucket in enumerate(buckets(outgoing(tensors, config), BUCKET_BYTES)):
            bucket_queue.add(pack(number, bucket, None, DEVICE))
        packed = hops(double)
        waiting = sum(bucket_queue[i].copy is not None for i in range(len(bucket_queue)))
        double.clear()
        for number in range(len(bucket_queue)):
            group.begin_sending(staging.lay_out(bucket_queue[number]), _nothing)
            group.finish(_nothing)
            bucket_queue[number].move_to_host()
        first = hops(double)
        good = _is_proven(bucket_queue, given)
    return {
        "packed": packed,
        "sent": first,
        "wire": wire.sent,
        "on_device": waiting,
        "limit": ON_DEVICE,
        "proven": good,
    }


def _nothing() -> None: ...


def _is_proven(bucket_queue: BucketQueue, given: dict[str, torch.Tensor]) -> bool:
    """Whether the host's copies have the checksums of the device, and the values."""
    for number in range(len(bucket_queue)):
        bucket = bucket_queue[number]
        payload = torch.cat(bucket.pieces)
        for entry in bucket.entries:
            value = decode(entry, payload[entry.offset : entry.offset + entry.size], None)
            if not has_checksum(value, entry.checksum):
                return False
            if not torch.equal(value, given[entry.name].bfloat16()):
                return False
    return True


class _Arrived:
    """A `Source` whose buckets have come to the device."""

    def __init__(self, bucket_queue: BucketQueue) -> None:
        self._buckets = [bucket_queue[number] for number in range(len(bucket_queue))]
        self._payloads: dict[str, torch.Tensor] = {}
        entries = [entry for bucket in self._buckets for entry in bucket.entries]
        self._manifest = make_manifest(7, entries)
        self.announcement = Announcement(version=7)

    def entries(self) -> Iterator[TensorEntry]:
        for bucket in self._buckets:
            (flat,) = bucket.pieces
            for entry in bucket.entries:
                self._payloads[entry.name] = flat[entry.offset : entry.offset + entry.size]
                yield entry

    def read(self, entry: TensorEntry) -> torch.Tensor:
        return self._payloads[entry.name]

    def manifest(self) -> Manifest:
        return self._manifest

    def close(self) -> None: ...


def receive(model_dir: str, cache: str) -> Figures:
    """Prove a version of a small model that came to the device, swap it in, and lay it out."""
    from tests.device_double import DEVICE, DeviceDouble

    double = DeviceDouble()
    model = EmbeddedModel(ModelConfig(path=model_dir), pack_weights=False, max_context=None)
    given = {n: torch.randn(shape) for n, shape in model.parameters.items()}
    bucket_queue, receiver = BucketQueue(), make_receiver(ReceiverConfig(cache_dir=cache))
    reader = Reader(receiver, ReceiverConfig(), Deadline(LIMIT_S))
    meta = WeightUpdateMeta(7, "nccl://trainer:1/v00000007")
    with double:
        double.move(model.module)
        model.device = Accelerator(DEVICE)
        model._parameters = dict(model.module.named_parameters())
        on_device = [(name, double.tensor(t)) for name, t in given.items()]
        bucket_queue.add(pack(0, on_device, None, DEVICE))
        double.clear()
        source = _Arrived(bucket_queue)
        tensors = reader._incoming(source, meta, model.parameters).collect()
        proven = hops(double)
        double.clear()
        staged = StagedWeights(7, source.manifest().digest, tensors, source.manifest().tensors)
        with torch.inference_mode(False):
            fitted = model.fit(staged)
            model.exchange(fitted)
        swapped = hops(double)
        double.clear()
        receiver.lay_out(staged)
        laid_out = hops(double)
        values = {name: tensor.cpu() for name, tensor in fitted.tensors.items()}
    receiver.close()
    return {
        "proven": proven,
        "swapped": swapped,
        "laid_out": laid_out,
        "num_tensors": len(given),
        "nbytes": sum(tensor.nbytes for tensor in given.values()),
        "equal": all(torch.equal(values[name], t) for name, t in given.items()),
    }


def behind() -> Figures:
    """Copy float32 masters of the device as bfloat16, to go out behind a step."""
    from tests.device_double import DeviceDouble

    double, given = DeviceDouble(), model()
    with double:
        tensors = [(name, double.tensor(t)) for name, t in given.items()]
        kept = dict(snapshot(tensors, torch.bfloat16))
    return hops(double) | {
        "equal": all(torch.equal(kept[name], t.bfloat16()) for name, t in given.items())
    }


def rooms() -> Figures:
    """Where buckets are received, by what they hold and whether there is room."""
    from tests.device_double import DEVICE, DeviceDouble

    entry = TensorEntry(
        name="w", shape=(8,), dtype="bfloat16", checksum="0" * 32, blob="b", size=16
    )
    raw = BucketHeader(entries=(entry,), size=16)
    packed = BucketHeader(entries=(entry.model_copy(update={"codec": "int8"}),), size=16)
    memory = Buffers()

    class Full(DeviceDouble):
        def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            if kwargs.get("device") is not None:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return super().run(func, args, kwargs)

    with DeviceDouble():
        found = {
            "raw": room_for(raw, DEVICE, memory).device.type,
            "packed": room_for(packed, DEVICE, memory).device.type,
            "host": room_for(raw, torch.device("cpu"), memory).device.type,
        }
    with Full():
        return found | {"full": room_for(raw, DEVICE, memory).device.type}


def retired() -> Figures:
    """Which memory of a device is allocated again."""
    from tests.device_double import DEVICE, DeviceDouble

    with DeviceDouble():
        small, large = allocate(64, DEVICE), allocate(4096, DEVICE)
        retire(large)
        retire(small)
        again = allocate(60, DEVICE)
        other = allocate(60, DEVICE)
        fresh = allocate(60, DEVICE)
    return {
        "smallest first": again.tensor is small.tensor,
        "then larger": other.tensor is large.tensor,
        "then new": fresh.tensor.numel(),
    }


def quantized() -> Figures:
    """Pack float32 masters of the device in 8 bits."""
    from tests.device_double import DEVICE, DeviceDouble

    double, given = DeviceDouble(), model()
    with double:
        tensors = [(name, double.tensor(t)) for name, t in given.items()]
        for number, bucket in enumerate(buckets(tensors, BUCKET_BYTES)):
            pack(number, bucket, "int8", DEVICE)
    return hops(double)


def share_parameters() -> Figures:
    """Hand parameters that lie on `gpu:0` to a generator whose device was given as `gpu`."""
    from tests.device_double import DeviceDouble

    double, given = DeviceDouble(), model(torch.bfloat16)
    expected = {name: torch.empty_like(t, device="meta") for name, t in given.items()}
    with double:
        held = GeneratorWeights(expected, torch.device("gpu"))
        placed = held.take(_parts(double, given), None)
        devices = {str(tensor.device) for tensor in placed.values()}
    return hops(double) | {"own_bytes": held.own_bytes, "devices": devices}


def _parts(double: Any, given: dict[str, torch.Tensor]) -> Iterator[TransferredTensor]:
    for name, tensor in given.items():
        yield TransferredTensor(name, double.tensor(tensor), is_shared_memory=True, is_frozen=False)
