"""A Ray cluster of this process, for tests."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Start one, and end it."""
    pytest.importorskip("ray")
    from headway.runtime.ray_clusters import join_cluster

    join_cluster(None, num_cpus=4, object_store_memory=1 << 27)
    yield
    shut_down()


def shut_down() -> None:
    """End the cluster, if there is one.

    On a busy machine Ray does not wait for its own processes, and warns of them when they are freed: in
    whichever test that happens.
    """
    ray = pytest.importorskip("ray")
    if ray.is_initialized():
        ray.shutdown()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
