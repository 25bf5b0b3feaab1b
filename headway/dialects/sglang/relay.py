"""A trainer broadcasts to one server what the whole fleet is to serve: the steps, from the gateway to it.

The server takes part in the trainer's process groups and puts the buckets together, as it would for
itself. Instead of serving an update that is complete, it offers it: the gateway publishes it, and all
servers read it from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, JsonValue

from headway.contracts.config.base import MAX_COUNT, Config
from headway.contracts.types import PolicyVersion
from headway.dialects.sglang.types import (
    EmptyBody,
    GroupUpdateBody,
    JoinGroupBody,
    LeaveGroupBody,
    RelabelBody,
    SGLangBody,
)

Step = Literal["join", "leave", "begin", "receive", "end", "complete", "relabel"]
BODIES: Mapping[Step, type[SGLangBody]] = {
    "join": JoinGroupBody,
    "leave": LeaveGroupBody,
    "begin": EmptyBody,
    "receive": GroupUpdateBody,
    "end": EmptyBody,
    "complete": EmptyBody,
    "relabel": RelabelBody,
}


class RelayRequest(Config):
    """`POST /v1/weights/relay`."""

    step: Step
    """`complete` offers the buckets that are there, as they are."""
    body: dict[str, JsonValue] = {}
    """Body of SGLang's call for this step."""
    version: PolicyVersion = Field(ge=0)
    """The version of the fleet, whose weights the update changes."""
    head: PolicyVersion = Field(ge=0)
    """The newest published version."""


class OfferedVersion(Config):
    """An update that is complete, held for the fleet to read."""

    version: PolicyVersion = Field(ge=0)
    digest: str
    label: str | None = None
    aborts: bool = False
    """End running sequences at the swap."""


class KeptBack(Config):
    """Buckets that are not served yet."""

    num_missing: int = Field(ge=0, lt=MAX_COUNT)
    """Parameters that the update has not brought so far."""
    missing: tuple[str, ...] = ()
    """One of them."""
    until: str
    """The call that publishes the update as it is."""

    @property
    def described(self) -> str:
        """Return a sentence for the trainer."""
        kept = f"It is kept back, and served at {self.until} at the latest"
        if not self.num_missing:
            return f"{kept}."
        return f"{kept}; {self.num_missing} parameters are missing, such as {self.missing[0]}."


class RelayResponse(Config):
    """What a step led to: at most one of these."""

    offered: OfferedVersion | None = None
    kept: KeptBack | None = None
    dropped: int = 0
    """Parameters that were received and are not served, since their group was left."""
    renamed: str | None = None
    """New name of the version that serves."""

    @property
    def described(self) -> str:
        """Return a sentence for the trainer; empty if there is nothing to say."""
        if self.offered is not None:
            label = self.offered.label or self.offered.version
            return f"Weight version updated to {label}."
        if self.kept is not None:
            return self.kept.described
        return dropped_text(self.dropped)


def dropped_text(count: int) -> str:
    """Return what a trainer is told when its group is left before an update is complete."""
    if not count:
        return ""
    return f"{count} parameters that were received and not yet served were dropped."
