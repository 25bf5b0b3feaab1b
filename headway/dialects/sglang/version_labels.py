"""Clients of SGLang name weights by text (`default`, `step-8`), the server by a growing integer.

Both are kept, so that every version that ever sampled a token is rendered by the text it was
published under. A version without a text of its own is its number. That holds for an update that
names no label too: SGLang goes on with the label before it, but then two different weights have one
name, and the spans of a sequence with tokens of both could not be distinguished.
"""

from __future__ import annotations

from headway.contracts.types import PolicyVersion

START_LABEL = "default"
"""SGLang's name for the weights that a server starts with, unless they were given a number."""
MAX_VERSION = 2**31 - 1
"""Trajectories carry versions as int32."""


def next_version(label: str | None, current: PolicyVersion) -> PolicyVersion:
    """The version of an update: the label's number if that is a newer one, else the next."""
    is_number = label is not None and label.isascii() and label.isdecimal()
    named = int(label) if label is not None and is_number and len(label) <= 10 else 0
    return named if current < named < MAX_VERSION and str(named) == label else current + 1


class VersionLabels:
    """Version -> label."""

    def __init__(self, initial: PolicyVersion) -> None:
        self._labels: dict[PolicyVersion, str] = {} if initial else {0: START_LABEL}

    def label(self, version: PolicyVersion) -> str:
        """The text of a version; its number if none was given."""
        return self._labels.get(version, str(version))

    def name(self, version: PolicyVersion, label: str | None) -> None:
        """Enter a label; None takes one out."""
        if label is None:
            self._labels.pop(version, None)
        else:
            self._labels[version] = label
