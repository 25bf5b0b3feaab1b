"""A version that flows into the live weights: the engine's own processes are members of the group.

    our process:     ranks -> group -> entries of a bucket, of the next one, ... -> digest -> received
    the engine:               joins    receives it      receives it           ends its session

The trainer's GPUs send to the engine's directly, without this process and without a copy of the version.
The price: from the first bucket until the commit nothing is generated, and an abort after the first
bucket leaves torn weights (`restored` from files, if they are known; otherwise the engine is given up).
Choose it where a version is too large to be received and held besides the one that serves, and a pause
as long as the transfer costs less than that memory.

Whether the bytes arrived is the engine's word: the entries are verified by the digest, the bytes only
where SGLang shows them (`/get_weights_by_name`, whole vectors of a few models), compared with their
checksums.
An engine that waits in a broadcast cannot be called back. It is let alone until the group's own
deadline, and given up after that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch

from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import BackendError, SyncError
from headway.contracts.types import GroupRank, PolicyVersion
from inference_server.backends.engine_process import EngineProcess, EngineResponse
from inference_server.backends.sglang.responses import MISSING, expect_success
from weight_sync.checkpoint import BUFFERS
from weight_sync.deadline import Deadline
from weight_sync.manifest import TensorEntry, content_digest, has_checksum, torch_dtype
from weight_sync.transports.daemon_calls import start_detached
from weight_sync.transports.participant import Participant
from weight_sync.transports.process_group import GroupAddress
from weight_sync.transports.rendezvous import BucketHeader

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 0.02
GRACE_S = 10.0
"""Seconds for late responses, besides the group's own time-outs."""
NUM_LOOKS = 4
"""Tensors that are compared with what was published."""


class GroupUpdate:
    """Staged version once it has arrived; then it is committed once, or given up."""

    held = None

    def __init__(self, version: PolicyVersion) -> None:
        loop = asyncio.get_running_loop()
        self.version = version
        self.digest = ""
        self._arrived: asyncio.Future[None] = loop.create_future()
        self.decided: asyncio.Future[UpdatePolicy] = loop.create_future()
        """Policy, set by the commit."""
        self._ended: asyncio.Future[int] = loop.create_future()

    async def until_arrived(self) -> None:
        """Raises:
        SyncError, BackendError: it did not, or not whole.
        """
        await asyncio.shield(self._arrived)

    async def commit(self, policy: UpdatePolicy) -> int:
        """Let the engine go on with it; the sequences that were frozen meanwhile.

        Raises:
            SyncError: it was given up before.
        """
        if not self.decided.done():
            self.decided.set_result(policy)
        return await asyncio.shield(self._ended)

    def report_received(self, digest: str) -> None:
        self.digest = digest
        self._arrived.set_result(None)

    def end(self, running: int) -> None:
        self._ended.set_result(running)

    def fail(self, error: Exception) -> None:
        """Raise the error in all present and future waits."""
        for future in (self._arrived, self._ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may never be awaited


class EngineGroup:
    """The process group that the engine's processes are in, from one version to the next."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._kept: GroupAddress | None = None

    def held(self, member: Participant, group_rank: GroupRank) -> str:
        """Return its name, if it was joined with these ranks."""
        kept = self._kept
        if kept is None or (kept.host, kept.port, kept.rank, kept.world_size) != (
            member.host,
            member.port,
            group_rank.rank,
            group_rank.world_size,
        ):
            return ""
        return kept.name

    async def join(self, address: GroupAddress, timeout_s: float) -> None:
        """Returns once all have come.

        Raises:
            SyncError: the engine refused.
            BackendError: it hangs there, and was given up.
        """
        await self.leave()
        self._kept = address
        body = {
            "group_name": address.name,
            "master_address": address.host,
            "master_port": address.port,
            "rank_offset": address.rank,
            "world_size": address.world_size,
            "backend": address.backend,
        }
        expect_success(await self._tell("/init_weights_update_group", body, timeout_s + GRACE_S))

    async def leave(self) -> None:
        """Its name is not used again."""
        kept, self._kept = self._kept, None
        if kept is not None:  # that there is no such group is as well
            await self._tell("/destroy_weights_update_group", {"group_name": kept.name}, GRACE_S)

    async def receive(self, header: BucketHeader) -> None:
        """One bucket into the live weights.

        Raises:
            SyncError: the engine refused, or did not receive it.
        """
        assert self._kept is not None, "join before"
        body = {
            "names": [entry.name for entry in header.entries],
            "dtypes": [entry.dtype for entry in header.entries],
            "shapes": [entry.shape for entry in header.entries],
            "group_name": self._kept.name,
            "flush_cache": False,
            "load_format": "flattened_bucket",
        }
        expect_success(await self._engine.post("/update_weights_from_distributed", body))

    async def _tell(self, path: str, body: Any, timeout_s: float) -> EngineResponse:
        try:
            return await self._engine.post(path, body, timeout_s)
        except BackendError as error:
            self._engine.fail(f"SGLang did not answer {path}: {error.message}")
            raise


class Transfer:
    """One version on its way into the engine.

    Args:
        shapes: of the model's parameters.
        dtype: of the engine's, if it is known: vectors of this type can be compared.
    """

    def __init__(
        self,
        engine: EngineProcess,
        group: EngineGroup,
        member: Participant,
        group_rank: GroupRank,
        deadline: Deadline,
        shapes: Mapping[str, torch.Size],
        dtype: str,
    ) -> None:
        self.version = member.announcement.version
        self.is_torn = False
        """The live weights may be no version."""
        self._engine = engine
        self._group = group
        self._member = member
        self._group_rank = group_rank
        self._deadline = deadline
        self._shapes = shapes
        self._dtype = dtype
        self._seen: dict[str, TensorEntry] = {}
        self._timeout_s = 0.0
        self._telling: asyncio.Task[None] | None = None
        self._has_session = False
        self._has_arrived = False

    async def join(self) -> BucketHeader:
        """Bring the engine into the group; returns when the first bucket can flow.

        Raises:
            SyncError: the epoch is over, or the version was given up.
        """
        held = self._group.held(self._member, self._group_rank)
        group_setup = await self._ask(lambda: self._member.join(held))
        self._timeout_s = group_setup.timeout_s
        if group_setup.is_new:
            address = GroupAddress(
                group_setup.group,
                self._member.host,
                self._member.port,
                self._group_rank.rank,
                self._group_rank.world_size,
                group_setup.backend,
            )
            await self._tell(self._group.join(address, group_setup.timeout_s))
        return await self._ask(lambda: self._member.bucket(0))

    async def receive(self, header: BucketHeader) -> str:
        """Let the frozen engine receive all buckets; return the digest.

        Raises:
            SyncError: as `join`, or it is of another model, or did not arrive as it was sent.
        """
        number = 0
        while header.digest is None:
            self._check_bucket(header)
            if number == 0:
                await self._tell(self._begin())
            self.is_torn = True
            await self._tell(self._group.receive(header))
            self._deadline.restart()
            number += 1
            header = await self._ask(lambda: self._member.bucket(number))  # noqa: B023 - awaited here
        self._check_all(header.digest)
        await self._tell(self._end())
        await self._tell(self._look())
        await self._ask(self._member.report_received)
        self._has_arrived = True
        return header.digest

    async def wanted(self, decision: asyncio.Future[UpdatePolicy]) -> UpdatePolicy:
        """Wait for the commit and return its policy.

        Raises:
            SyncError: the version was given up.
        """
        while not decision.done():
            self._deadline.restart()  # the version gate limits how long this may take
            self._deadline.check()
            await asyncio.wait({decision}, timeout=LOOK_S)
        return decision.result()

    async def stop(self, error: BaseException) -> Exception:
        """End it for everybody, and wait until the engine has let go; returns why it ended.

        An engine that does not let go is given up.
        """
        failure = error if isinstance(error, Exception) else SyncError("the server ends")
        if not self._has_arrived:
            failure = await self._leave(failure)
        try:
            if self._telling is not None:
                async with asyncio.timeout(self._timeout_s + GRACE_S):
                    await asyncio.wait({self._telling})
            if self._has_session:
                await self._end()
            if not self._has_arrived:
                await self._group.leave()
        except (SyncError, BackendError, TimeoutError) as stuck:
            self._engine.fail(f"SGLang did not let go of version {self.version}: {stuck!r}")
        return failure

    async def _leave(self, failure: Exception) -> Exception:
        reason = failure if isinstance(failure, SyncError) else SyncError(str(failure))
        leaving = asyncio.wrap_future(start_detached(lambda: self._member.leave(reason)))
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):  # a stopped trainer answers nothing
                reason = await leaving
        return reason if isinstance(failure, SyncError) else failure

    async def _ask(self, question: Callable[[], T]) -> T:
        """Ask the rendezvous."""
        return await self._until(asyncio.wrap_future(start_detached(question)))

    async def _tell(self, order: Awaitable[None]) -> None:
        """Have the engine do something; when this raises, it may be doing it still."""
        self._telling = asyncio.ensure_future(order)
        await self._until(self._telling)
        self._telling = None

    async def _until(self, work: asyncio.Future[T]) -> T:
        work.add_done_callback(_heard)
        while not work.done():
            self._deadline.check()
            await asyncio.wait({work}, timeout=LOOK_S)
        return work.result()

    async def _begin(self) -> None:
        answer = await self._engine.post("/begin_weight_update", {})
        if answer.status not in MISSING:  # an old server knows no sessions
            expect_success(answer)
            self._has_session = True

    async def _end(self) -> None:
        if self._has_session:
            expect_success(await self._engine.post("/end_weight_update", {}))
            self._has_session = False

    def _check_bucket(self, header: BucketHeader) -> None:
        offset = 0
        for entry in header.entries:
            expected = self._shapes.get(entry.name)
            if expected is not None and tuple(expected) != entry.shape:
                raise SyncError(
                    f"version {self.version} is of another model: {entry.name} has shape "
                    f"{entry.shape}, {tuple(expected)} in the model"
                )
            if entry.codec != "raw" or entry.offset != offset:
                raise self._not_as_it_is(entry.name)
            offset += entry.size
            self._seen[entry.name] = entry
        if offset != header.size:  # Gloo ends a process that expects another size than is sent
            raise self._not_as_it_is(header.entries[-1].name)

    def _not_as_it_is(self, name: str) -> SyncError:
        return SyncError(
            f"{name} in version {self.version} is rounded or padded, and SGLang receives only what is "
            "sent as it is; unset weight_sync.quantization, or set backend.receive to files"
        )

    def _check_all(self, digest: str) -> None:
        seen = self._seen
        if content_digest(self.version, [*seen.values()]) != digest:
            raise SyncError(
                f"version {self.version} came with other entries than were sent: wrong digest"
            )
        known = {entry.checksum for name, entry in seen.items() if name in self._shapes}
        missing = sorted(self._shapes.keys() - seen.keys())
        extra = sorted(
            name
            for name, entry in seen.items()
            if name not in self._shapes
            and not name.endswith(BUFFERS)
            and entry.checksum not in known  # a tied weight comes under both of its names
        )
        if missing or extra:
            raise SyncError(
                f"version {self.version} is of another model: missing {missing[:3]}, extra "
                f"{extra[:3]}"
            )

    async def _look(self) -> None:
        """Compare what the engine shows with what was published."""
        vectors = [e for e in self._seen.values() if len(e.shape) == 1 and e.dtype == self._dtype]
        step = max(1, len(vectors) // NUM_LOOKS)
        chosen = vectors[::step][:NUM_LOOKS]
        num_seen = 0
        for entry in chosen:
            body = {"name": entry.name, "truncate_size": entry.shape[0]}
            answer = await self._engine.post("/get_weights_by_name", body)
            if not answer.is_ok:
                break  # most models of SGLang show nothing
            if not _is_published(answer.json(), entry):
                raise SyncError(f"{entry.name} did not arrive in the engine as it was published")
            num_seen += 1
        log.info(
            "a version was received in the live weights",
            extra={"version": self.version, "compared": num_seen, "tensors": len(self._seen)},
        )


def _is_published(values: Any, entry: TensorEntry) -> bool:
    try:
        shown = torch.tensor(values, dtype=torch_dtype(entry.dtype))
    except (TypeError, ValueError, RuntimeError):
        return False
    return has_checksum(shown, entry.checksum)


def _heard(work: asyncio.Future[Any]) -> None:
    """Retrieve the exception of work that ended too late, so that asyncio does not log it."""
    if not work.cancelled():
        work.exception()
