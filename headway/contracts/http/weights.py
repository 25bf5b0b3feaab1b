"""Publication of weights: to the gateway, and from it to the servers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from headway.contracts.config.base import MAX_COUNT, Config, Identifier
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.http.paths import WEIGHTS_HELD
from headway.contracts.types import PolicyVersion

HELD_ROOT = WEIGHTS_HELD.partition("{")[0]


def held_root(version: PolicyVersion) -> str:
    """The path below which a server serves the blobs of a version that it holds."""
    return WEIGHTS_HELD.format(version=version, blob="").rstrip("/")


WeightPath = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]


class WeightUpdateRequest(Config):
    """`POST /v1/weights`: make a published version the one that samples.

    Answered when it is committed; sent again, it is answered without work. It may be sent before the
    version is complete: servers then stage what is there and wait for the rest.
    """

    version: PolicyVersion = Field(ge=0)
    path: WeightPath
    policy: UpdatePolicy | None = None
    """Effect of the swap on running sequences; None takes each server's `update_policy`."""
    publisher: Identifier | None = None
    """The attached consumer who publishes; needed while one is attached."""
    term: int = Field(0, ge=0, lt=MAX_COUNT)
    """Term that `POST /v1/consumer` returned; an older incarnation of the publisher is refused."""


class WeightCancelRequest(Config):
    """`DELETE /v1/weights`: the publisher gives up a version that it announced."""

    version: PolicyVersion = Field(ge=0)
    publisher: Identifier | None = None
    term: int = Field(0, ge=0, lt=MAX_COUNT)
    reason: str = Field("", max_length=4096)


GROUP_SCHEMES = ("gloo://", "nccl://", "ipc://")


def is_group(path: str) -> bool:
    """True if a version flows through a process group: it is stored nowhere afterwards."""
    return path.startswith(GROUP_SCHEMES)


def is_stored(path: str) -> bool:
    """False if a version flows through a process group, or is in the memory of the server it names."""
    return not is_group(path) and HELD_ROOT not in path


class GroupRankBody(Config):
    """See `types.GroupRank`."""

    rank: int = Field(ge=1, lt=MAX_COUNT)
    world_size: int = Field(ge=2, lt=MAX_COUNT)


class WeightPrepareRequest(Config):
    """`POST /v1/weights/prepare`: stage a version while generation goes on.

    `epoch` numbers the publications of a gateway, rollbacks too. A server obeys the highest epoch that
    it has heard of; a gateway with an older one gets `fenced`.
    """

    epoch: int = Field(ge=0, lt=MAX_COUNT)
    version: PolicyVersion = Field(ge=0)
    path: WeightPath
    digest: str | None = None
    """Digest that the version must turn out to have."""
    fallbacks: tuple[WeightPath, ...] = Field((), max_length=64)
    group_rank: GroupRankBody | None = None
    """Rank in the process group, if the version flows through one."""
    timeout_s: float = Field(300.0, gt=0.0)
    """Staging is given up after this long, and what was staged is dropped if no commit follows within
    it."""


class WeightPrepareResponse(Config):
    version: PolicyVersion
    digest: str
    """Digest of what was staged; empty if it cannot be known."""


class WeightCommitRequest(Config):
    """`POST /v1/weights/commit`."""

    epoch: int = Field(ge=0, lt=MAX_COUNT)
    version: PolicyVersion = Field(ge=0)
    policy: UpdatePolicy | None = None
    """See `WeightUpdateRequest`."""


class WeightAbortRequest(Config):
    """`POST /v1/weights/abort`: forget what this epoch staged, or still stages."""

    epoch: int = Field(ge=0, lt=MAX_COUNT)
    version: PolicyVersion = Field(ge=0)


class WeightUpdateResponse(Config):
    version: PolicyVersion
    """The version that serves."""
    running: int = Field(0, ge=0, lt=MAX_COUNT)
    """Sequences that were being generated at the moment of the swap."""
    digest: str = ""
    """Digest of the version that serves; empty if it is not known."""


class WeightPinRequest(Config):
    """`POST /v1/weights/pin`: serve this version, and hold it while others are published."""

    version: PolicyVersion | None = Field(None, ge=0)
    """A kept version; None ends the pin and goes on with the newest."""


class WeightRollbackRequest(Config):
    """`POST /v1/weights/rollback`: go back to a kept version, until the next one is published."""

    version: PolicyVersion = Field(ge=0)


class WeightRecord(Config):
    """One published version, as the gateway remembers it."""

    version: PolicyVersion
    path: str
    digest: str | None = None
    label: str | None = None
    """Text by which its publisher, a client of SGLang's API, names it."""


class WeightReservation(Config):
    """`POST /v1/weights/reservation`: some servers stay at a version while others are published.

    They take requests for exactly this version and no others. There is one reservation at a time; it
    ends unless it is repeated, every few seconds.
    """

    name: Identifier
    """Name of the reservation: repeated requests carry the same one."""
    version: PolicyVersion = Field(ge=0)
    """The version that serves, or a kept version."""
    servers: int = Field(1, ge=1, lt=MAX_COUNT)
    """Servers to take out of the others' traffic, at most; one is always left to it."""


class ReservationStatus(Config):
    """State of a reservation."""

    servers: list[str]
    """Servers that stay at the version, or are being brought to it."""
    num_ready: int
    """Servers that take requests for it now, also those that the next version will reach."""
    failure: str | None = None
    """Why one of them could not be brought to it; None if none has failed."""


class ReservationEndRequest(Config):
    """`DELETE /v1/weights/reservation`: its servers go on with the newest version."""

    name: Identifier


class WeightStatus(Config):
    """`GET /v1/weights`."""

    committed: WeightRecord | None
    """The version that serves; None before the first publication."""
    head: PolicyVersion
    """Newest published version; numbers up to it are used up."""
    epoch: int
    """Epoch of the last transaction."""
    pinned: PolicyVersion | None
    reserved: PolicyVersion | None = None
    """The version that some servers stay at."""
    publishing: PolicyVersion | None
    """A version whose transaction is under way."""
    kept: list[WeightRecord]
    """Locations of earlier versions; a rollback finds out whether they still exist."""
