from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.weight_channel_suite import Channel


@pytest.fixture
def channel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Channel]:
    """A weight transport; parametrised by `weight_channel_suite.on`."""
    with Channel(request.param, tmp_path) as channel:
        yield channel
