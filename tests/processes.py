"""Processes of tests, forked from one that has imported the project already.

Modules of the project are forked by the product's own template (`start_process`, `local_run`), functions
by multiprocessing's server (`FORKS`), which every test process starts once.
"""

from __future__ import annotations

import multiprocessing
from contextlib import chdir
from functools import cache
from pathlib import Path

from headway.contracts.config.launch import LaunchConfig
from headway.launch.launchers.local import LocalRun
from headway.launch.launchers.preload import PRELOADED, child_environment
from headway.runtime.fork_server import ForkServer
from headway.runtime.process import Process, ProcessSpec

ROOT = Path(__file__).parents[1]
TEST_MODULES = ("tests.integration.publishing_trainer", "tests.integration.traps")

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "trainer.workers.roles",
        "trainer.interfaces.ppo_actor",
        "transformers.models.llama.modeling_llama",
        "torch.distributed.checkpoint.state_dict",
        "tests.numeric.worker_rows",
        "tests.integration.publishing_trainer",
        "tests.unit.weight_sync.collective_child",
    ]
)


@cache
def template() -> ForkServer:
    """The template of this test process; it ends with it."""
    with chdir(ROOT):  # whichever folder a test is in: what it forks imports from here
        return ForkServer((*PRELOADED, *TEST_MODULES), child_environment(1))


def start_process(spec: ProcessSpec) -> Process:
    """Start a Python module, or another program, of a test."""
    return Process(spec, template())


def local_run(config: LaunchConfig) -> LocalRun:
    """A run whose processes start within milliseconds."""
    return LocalRun(config, template())
