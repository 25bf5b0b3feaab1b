"""Processes of tests, forked from one that has imported the project already."""

from __future__ import annotations

from functools import cache

from headway.contracts.config.launch import LaunchConfig
from headway.launch.launchers.local import PRELOADED, LocalRun, child_environment
from headway.runtime.process import Process, ProcessSpec
from headway.runtime.template import ProcessTemplate

TEST_MODULES = ("tests.integration.publishing_trainer", "tests.integration.traps")


@cache
def template() -> ProcessTemplate:
    """The template of this test process; it ends with it."""
    return ProcessTemplate((*PRELOADED, *TEST_MODULES), child_environment(1))


def start_process(spec: ProcessSpec) -> Process:
    """Start a Python module, or another program, of a test."""
    return Process(spec, template())


def local_run(config: LaunchConfig) -> LocalRun:
    """A run whose processes start within milliseconds."""
    return LocalRun(config, template())
