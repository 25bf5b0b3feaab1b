"""Owners of leases: a process, at a place that only one process has at a time.

A process that is started again at a place finds by that name what the former one left behind, and need
not wait for the end of its leases. An empty place is nobody's: nothing is known of who was there.
"""

from __future__ import annotations

import os
import uuid


def new_owner(place: str) -> str:
    """The name of this process; no other has it."""
    return f"{place}/{os.getpid()}-{uuid.uuid4().hex[:8]}"


def place_of(owner: str) -> str:
    """Return the place of an owner, present or former."""
    return owner.rpartition("/")[0]
