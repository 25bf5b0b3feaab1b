"""Shared by all tests: one thread for torch, no network, no GPU unless `-m gpu` asks for one, repeatable
property tests, registries that hold after a file what they held before it, and a word on what `make test`
left out."""

import gc
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Of a shell's background job SIGINT is ignored, and a process that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

from headway.contracts.registry import Registry
from headway.runtime.gpus import VISIBLE, survey_gpus

# Hundreds of thousands of objects are made while modules are imported, and live to the end: looking
# through them again and again is a sixth of the time.
gc.disable()

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


@pytest.fixture(scope="module", autouse=True)
def the_process_group_of_a_file_goes_with_it() -> Iterator[None]:
    """Likewise the default group, which an engine that computes in float16 opens by itself."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def transformers_is_whole_after_a_file() -> Iterator[None]:
    """What it replaces in its classes while it makes a model is back: else no later model is whole."""
    yield
    module = sys.modules.get("transformers.modeling_utils")
    assert module is None or module.PreTrainedModel.tie_weights.__name__ == "tie_weights", (
        "two threads of a test made models at once without MAKING_MODELS (`weight_sync/model_dir.py`)"
    )


def _registries() -> list[Registry]:
    from gateway.filters.base import FILTERS
    from gateway.rewards.base import REWARDS
    from gateway.tools.base import TOOLS
    from gateway.workflows.base import WORKFLOWS
    from trainer.tracking.base import SINKS

    registries: list[Registry] = [FILTERS, REWARDS, SINKS, TOOLS, WORKFLOWS]
    for registry in registries:
        registry.names()
    return registries


LEFT_OUT = pytest.StashKey[Counter[str]]()
"""Tests of each file that the marker expression of `make test` left to `make test-all`."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()
    if not wants_gpus(config.option.markexpr):
        os.environ[VISIBLE] = ""  # of children, too; CUDA reads it when it starts


def wants_gpus(expression: str) -> bool:
    """Whether a marker expression asks for tests on GPUs. The others compare with the CPU bit by bit, or
    start more ranks than there are devices."""
    return re.search(r"(?<!not )\bgpu\b", expression) is not None


def pytest_report_header(config: pytest.Config) -> list[str]:
    if wants_gpus(config.option.markexpr) or not survey_gpus().has_gpus:
        return []
    return ["GPUs: hidden from these tests; `make test-gpu` runs those that want them"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """A file's `SHORT_RUN` names the tests that `make test` runs, or its `LONG_RUN` those that it leaves
    out: they are `extended`."""
    for item in items:
        module = getattr(item, "module", None)
        short, long = getattr(module, "SHORT_RUN", None), getattr(module, "LONG_RUN", ())
        if item.name in long or (short is not None and item.name not in short):
            item.add_marker("extended")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("extended") is not None:
            item.config.stash[LEFT_OUT][item.nodeid.partition("::")[0]] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker process tells the main one."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker process has collected the same."""
    told = getattr(node, "workeroutput", {}).get("left_out", {})
    node.config.stash[LEFT_OUT] |= Counter(told)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left_out = config.stash[LEFT_OUT]
    if left_out:
        terminalreporter.section(f"{left_out.total()} tests left to `make test-all`")
        for file, count in sorted(left_out.items()):
            terminalreporter.line(f"{count:4} in {file}")
