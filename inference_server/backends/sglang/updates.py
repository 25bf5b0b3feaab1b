"""New weights for a halted SGLang engine, from a directory. What it refuses leaves the old ones."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from headway.contracts.errors import SyncError
from headway.contracts.types import PolicyVersion
from inference_server.backends.engine_process import EngineProcess
from inference_server.backends.sglang.responses import MISSING, expect_success, read_label
from weight_sync.channel import VerifiedVersion

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FolderUpdate:
    """A verified version that the engine reads from a directory."""

    version: PolicyVersion
    folder: str
    digest: str = ""
    held: VerifiedVersion | None = None


async def load_folder(engine: EngineProcess, update: FolderUpdate, flushes: bool) -> None:
    """Let the engine read a directory.

    Raises:
        SyncError: it refused; the old weights remain.
    """
    try:
        await restore_folder(engine, update, flushes)
    except SyncError as error:
        if await read_label(engine) != str(update.version):
            raise
        log.warning("the weights changed, the cache remained", extra={"reason": error.message})


async def restore_folder(engine: EngineProcess, update: FolderUpdate, flushes: bool) -> None:
    """Load as `load_folder` does, for a version whose label the weights have already.

    Raises:
        SyncError: it refused; the weights are what they were.
    """
    body = {
        "model_path": update.folder,
        "weight_version": str(update.version),
        "flush_cache": flushes,
        "abort_all_requests": False,
    }
    expect_success(await engine.post("/update_weights_from_disk", body))


async def relabel(engine: EngineProcess, version: PolicyVersion) -> None:
    """Call the weights this version from now on.

    Raises:
        SyncError: it refused.
    """
    body = {"new_version": str(version), "abort_all_requests": False}
    answer = await engine.post("/update_weight_version", body)
    if answer.status not in MISSING:  # an old server gives weights no name
        expect_success(answer)
