"""The Ray cluster of this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

NICENESS = "RAY_worker_niceness"
"""Variable of a cluster's priority for its workers. Ray's default, 15, leaves them 3 % of a CPU that
others want, too."""


def join_cluster(address: str | None, **options: Any) -> Callable[[], None]:
    """Join a Ray cluster, unless this process is in one.

    Args:
        address: None joins the one that RAY_ADDRESS names, or starts one on this machine, whose workers
            have the priority of ordinary processes.
        options: further ones of `ray.init`.
    Returns:
        A function that leaves it, and ends it if it was started here.
    """
    import ray  # an extra

    if ray.is_initialized():
        return lambda: None
    os.environ.setdefault(NICENESS, "0")
    ray.init(address=address, include_dashboard=False, log_to_driver=False, **options)
    return ray.shutdown
