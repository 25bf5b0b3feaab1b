"""A rolling upgrade to a release with new optional fields while a run goes on: gateway, then servers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from headway.contracts.config.launch import LaunchConfig
from headway.contracts.http.paths import STATUS
from headway.launch.launchers.local import LocalRun
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.process import Process
from tests.integration.driving import END_S, START_S, steps_of, until_steps
from tests.integration.newer_release import NOVELTY
from tests.processes import template
from tests.waiting import eventually

pytestmark = pytest.mark.extended
STEPS = 16


class UpgradedRun(LocalRun):
    """A run whose services are replaced one by one."""

    def upgrade(self, name: str) -> None:
        """End a process as a deployment does, and start that of the later release in its place."""
        kind = "gateway" if name == "gateway" else "server"
        old = self.process(name)
        flags = old.spec.argv[old.spec.argv.index("--config") :]
        argv = [sys.executable, "-m", "tests.integration.newer_release", kind, *flags]
        old.stop(30.0)
        self._processes[name] = Process(replace(old.spec, argv=argv))
        self._processes[name].wait_ready(START_S)


def test_a_later_release_takes_over_while_a_run_goes_on(
    make_config: Callable[..., LaunchConfig], tmp_path: Path
) -> None:
    config = make_config(steps=STEPS, num_servers=2)
    with UpgradedRun(config, template()) as run:
        run.start()
        client = RemoteInferenceEngine(run.url, connect_timeout_s=START_S)

        def novelties() -> list[str | None]:
            shown = httpx.get(run.url + STATUS).json()["servers"]
            return sorted(
                (one["novelty"] for one in shown if one["state"] == "ready"), key=str, reverse=True
            )

        until_steps(config, 2)
        run.upgrade("gateway")
        eventually(lambda: novelties() == [None, None], START_S, "old servers report to it")
        for name in ("server-0", "server-1"):
            done = len(steps_of(config))
            run.upgrade(name)
            until_steps(config, min(done + 2, STEPS))
        eventually(lambda: novelties() == [NOVELTY, NOVELTY], START_S, "new servers report to it")
        eventually(lambda: run.watch() is not None, END_S, "the trainer has ended")
        assert run.watch() == 0, run.process("trainer").log_tail()
        assert [step["step"] for step in steps_of(config)] == list(range(STEPS))
        audit = client.audit()
        assert (audit.lost, audit.duplicated) == (0, 0)
        client.destroy()
