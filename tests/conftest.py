"""What every test shares: one thread for torch, no network, repeatable property tests, registries
that hold after a file what they held before it."""

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings

from headway.contracts.registry import Registry

settings.register_profile(
    "headway",
    deadline=None,  # a shared machine stalls; pytest-timeout watches the whole test
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("headway")


@pytest.fixture(scope="module", autouse=True)
def what_a_file_registers_goes_with_it() -> Iterator[None]:
    """Test files share a process: a name that one registers must not be seen by the next."""
    before = {registry: dict(registry._targets) for registry in _registries()}
    yield
    for registry in _registries():
        for name in registry._targets.keys() - before[registry].keys():
            del registry._targets[name]


def _registries() -> list[Registry]:
    from headway.rollout.filters.base import FILTERS
    from headway.rollout.rewards.base import REWARDS
    from headway.rollout.tools.base import TOOLS
    from headway.rollout.workflows.base import WORKFLOWS
    from trainer.tracking.base import SINKS

    registries: list[Registry] = [FILTERS, REWARDS, SINKS, TOOLS, WORKFLOWS]
    for registry in registries:
        registry.names()
    return registries
