"""New weights for a halted SGLang engine: from a directory, or from a process group.

An update that SGLang refuses leaves the old weights. One that stops half way over a group leaves
neither version: the engine is given up, so that it is started again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.contracts.errors import ServiceError, SyncError
from headway.contracts.types import PolicyVersion
from inference_server.backends.engine_process import EngineProcess
from inference_server.backends.sglang.answers import MISSING, expect_success, read_label
from weight_sync.channel import ProvenVersion

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FolderUpdate:
    """A proven version that the engine reads from a directory."""

    version: PolicyVersion
    folder: str
    digest: str = ""
    held: ProvenVersion | None = None


@dataclass(frozen=True, slots=True)
class TensorBucket:
    """Tensors of one call, in the order in which rank 0 broadcasts them."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    load_format: str | None = None
    """`flattened_bucket`: all of them as one tensor of bytes."""


@dataclass(frozen=True, slots=True)
class GroupUpdate:
    """A version that a trainer broadcasts to a group which the engine has joined."""

    version: PolicyVersion
    group_name: str
    buckets: Sequence[TensorBucket]
    timeout_s: float = 600.0
    """The engine is given up if its trainer stays silent for longer."""
    digest: str = ""
    held: None = None


@dataclass(frozen=True, slots=True)
class GroupMember:
    """The engine's place in a trainer's group; its first process has rank `rank_offset`."""

    group_name: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str = "nccl"


async def join_group(engine: EngineProcess, member: GroupMember, timeout_s: float) -> None:
    """Returns once rank 0 has joined too.

    Raises:
        SyncError: the engine refused.
        BackendError: no answer within `timeout_s`.
    """
    body = {
        "group_name": member.group_name,
        "master_address": member.master_address,
        "master_port": member.master_port,
        "rank_offset": member.rank_offset,
        "world_size": member.world_size,
        "backend": member.backend,
    }
    expect_success(await engine.post("/init_weights_update_group", body, timeout_s))


async def leave_group(engine: EngineProcess, group_name: str) -> None:
    """Raises:
    SyncError: there is no such group.
    """
    answer = await engine.post("/destroy_weights_update_group", {"group_name": group_name})
    expect_success(answer)


async def load_folder(engine: EngineProcess, update: FolderUpdate, flushes: bool) -> None:
    """Let the engine read a directory.

    Raises:
        SyncError: it refused; the old weights remain.
    """
    label = str(update.version)
    body = {
        "model_path": update.folder,
        "weight_version": label,
        "flush_cache": flushes,
        "abort_all_requests": False,
    }
    answer = await engine.post("/update_weights_from_disk", body)
    try:
        expect_success(answer)
    except SyncError as error:
        if await read_label(engine) != label:
            raise
        log.warning("the weights changed, the cache remained", extra={"reason": error.message})


async def receive(engine: EngineProcess, update: GroupUpdate, flushes: bool) -> None:
    """Let the engine receive a broadcast.

    Raises:
        SyncError: refused before anything was received, or torn and the engine given up.
    """
    if not update.buckets:
        raise SyncError(f"version {update.version} has no tensors; name what is broadcast")
    has_session = await _begin(engine)
    try:
        async with asyncio.timeout(update.timeout_s):
            for bucket in update.buckets:
                is_last = bucket is update.buckets[-1]
                body = _bucket_body(update, bucket, is_last, flushes and is_last)
                expect_success(await engine.post("/update_weights_from_distributed", body))
        if has_session:
            expect_success(await engine.post("/end_weight_update", {}))
    except (ServiceError, TimeoutError) as error:
        reason = f"version {update.version} was received in part, the weights are torn: {error!r}"
        engine.fail(reason)
        raise SyncError(reason) from error


async def _begin(engine: EngineProcess) -> bool:
    """Open a session; false on a server that knows none."""
    answer = await engine.post("/begin_weight_update", {})
    if answer.status in MISSING:
        return False
    expect_success(answer)
    return True


def _bucket_body(
    update: GroupUpdate, bucket: TensorBucket, is_last: bool, flushes: bool
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "names": list(bucket.names),
        "dtypes": list(bucket.dtypes),
        "shapes": [list(shape) for shape in bucket.shapes],
        "group_name": update.group_name,
        "flush_cache": flushes,
    }
    if is_last:
        body["weight_version"] = str(update.version)
    if bucket.load_format is not None:
        body["load_format"] = bucket.load_format
    return body
