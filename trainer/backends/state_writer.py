"""States of training on their way to disk, in the caller's time or behind its back."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from headway.contracts.errors import StateError
from trainer.topology import Topology
from trainer.transfer import finish_copies

COPY_AT_ONCE = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)
COPY_BEHIND = StagingOptions(
    use_pinned_memory=True,
    use_shared_memory=False,
    use_async_staging=True,
    use_non_blocking_copy=True,
)
"""Options for a GPU: a stream and a thread of their own copy to pinned memory during the next passes."""


class StateWriter:
    """Writes what the ranks hold of a state; one state at a time.

    Behind the caller's back, a thread of each rank writes a copy in the CPU's memory. These threads agree
    in a process group of their own: between training's collectives, theirs would come in any order. The
    copy's memory is kept for the next state. On a GPU the copy itself is made behind the caller's back,
    too, and `finish_snapshot` has to be called before the state changes.
    """

    def __init__(self, topology: Topology, options: StagingOptions | None = None) -> None:
        """
        Args:
            options: of the copy; None chooses them by the device.
        """
        self._device = topology.device
        self._is_single = topology.world_size == 1
        self._ranks = topology.group
        self._group: dist.ProcessGroup | None = None
        by_device = COPY_BEHIND if topology.device.type == "cuda" else COPY_AT_ONCE
        self._stager = DefaultStager(options or by_device)
        self._snapshot: Future[Any] | None = None

    def write(self, state: dict[str, Any], path: str, asynchronous: bool) -> Future[None]:
        """Store a state; collective.

        Args:
            asynchronous: return once it is copied, or once `finish_snapshot` can wait for that; the
                caller waits for the end before the next one.
        Returns:
            Done once the files of all ranks are durable; or failed on all ranks with a `StateError`.
        Raises:
            StateError: what is not asynchronous failed on any rank.
        """
        if self._is_single:
            accept_no_group()
        if asynchronous:
            return self._write_behind(state, path)
        try:
            save_state(
                state, checkpoint_id=path, process_group=self._ranks, no_dist=self._is_single
            )
        except (CheckpointException, OSError, RuntimeError) as error:
            raise _unwritten(path, error) from error
        return completed()

    def _write_behind(self, state: dict[str, Any], path: str) -> Future[None]:
        if self._group is None and not self._is_single:
            members = None if self._ranks is None else dist.get_process_group_ranks(self._ranks)
            self._group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        finish_copies(self._device)  # the copying stream does not wait for what computes the state
        saving = async_save(
            state,
            checkpoint_id=path,
            process_group=self._group,
            async_stager=self._stager,
            no_dist=self._is_single,
        )
        if isinstance(saving, AsyncSaveResponse):
            self._snapshot, saving = saving.staging_completion, saving.upload_completion
        written: Future[None] = Future()

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(_unwritten(path, error))

        saving.add_done_callback(settle)
        return written

    def finish_snapshot(self) -> None:
        """Wait until the last state is copied, or has failed to be: its future has the error."""
        if self._snapshot is not None:
            self._snapshot.exception()
            self._snapshot = None


def reason(error: BaseException) -> str:
    """Return the reason of an error, without the stacks that torch puts into its message."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    failures = sorted(error.failures.items())
    return "; ".join(f"rank {rank}: {reason(failure)}" for rank, (failure, _) in failures)


def _unwritten(path: str, error: BaseException) -> StateError:
    failure = StateError(f"{path} could not be written: {reason(error)}; mend the cause and resume")
    failure.__cause__ = error
    return failure


def completed() -> Future[None]:
    """Return the future of something that is stored already."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def accept_no_group() -> None:
    """One process without a group is what we mean; torch warns that it might not be.

    For good: a context would race with the thread that writes.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
