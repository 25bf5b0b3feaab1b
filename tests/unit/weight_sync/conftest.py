from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.unit.weight_sync.collective_child import Child, Spawn
from weight_sync.transports.collective import CHANNEL
from weight_sync.transports.collective_publisher import CollectivePublisher


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Child())


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


@pytest.fixture
def make_publisher(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[..., CollectivePublisher]]:
    """With the module's `CONFIG`, and changes."""
    with ExitStack() as stack:

        def make(**changes: object) -> CollectivePublisher:
            publisher = CHANNEL.make_publisher(request.module.CONFIG.model_copy(update=changes))
            stack.callback(publisher.close)
            return publisher

        yield make
