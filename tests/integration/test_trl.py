"""TRL, the real package, trains against a gateway as it would against vLLM."""

from __future__ import annotations

import ast
import os
import queue
import signal
import subprocess
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.integration.real_engines import ROOT, engine_python, needs, show
from tests.integration.test_fleet_adapters import write_plain_model
from tests.integration.version_fleet import LIMIT_S, Fleet

pytestmark = needs("vllm")
STEPS = 10
START_S = 150.0
ASYNCHRONOUS = Path(__file__).with_name("trl_trainer.py")
GRPO = ROOT / "examples" / "trl" / "grpo.py"


class TRL:
    """The trainer, a process in an environment of its own."""

    def __init__(self, folder: Path, *command: object) -> None:
        """
        Args:
            command: script and arguments.
        """
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
        self._log = folder / "trl.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [engine_python("vllm"), *map(str, command)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=kept | quiet,
                cwd=folder,
                start_new_session=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def step(self, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """What the next step logs."""
        while True:
            line = self._lines.get(timeout=limit_s)
            assert line, self._log.read_text()[-4000:]
            if line.startswith("{") and "reward" in line:
                return ast.literal_eval(line)

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # its rollout worker, too
        self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")


def test_the_asynchronous_trainer_learns_while_servers_die_and_join(tmp_path: Path) -> None:
    with (
        closing(Fleet(tmp_path, 2, write_model=write_plain_model)) as fleet,
        closing(
            TRL(tmp_path, ASYNCHRONOUS, fleet.url, fleet.model, fleet.weights / "trl", STEPS)
        ) as trl,
    ):
        steps = [trl.step(START_S)]
        fleet.kill(0, 0)
        steps += [trl.step() for _ in range(2)]
        fleet.join()
        steps += [trl.step() for _ in range(STEPS - 3)]
        names = [model.id for model in fleet.openai.models.list().data][1:]
    rewards = [float(step["reward"]) for step in steps]
    show(f"rewards {' '.join(f'{reward:.3f}' for reward in rewards)}")
    # Sampled by the weights that train: the ratio of their probabilities is one.
    assert float(steps[0]["ratio"]) == pytest.approx(1.0, abs=1e-3)
    assert float(steps[0]["kl"]) == pytest.approx(0.0, abs=1e-3)
    assert min(rewards[-2:]) > 0.1 + max(rewards[:2])
    assert names == [f"trl-policy-v{STEPS}", f"trl-policy-v{STEPS + 1}"]


def test_the_trainer_of_server_mode_learns_while_servers_die_and_join(tmp_path: Path) -> None:
    with closing(Fleet(tmp_path, 2, write_model=write_plain_model)) as fleet:
        folder = fleet.weights / "trl"
        command = [GRPO, "--url", fleet.url, "--model", fleet.model, "--folder", folder]
        with closing(TRL(tmp_path, *command, "--steps", STEPS)) as trl:
            steps = [trl.step(START_S)]
            fleet.kill(0, 0)
            steps += [trl.step() for _ in range(2)]
            fleet.join()
            steps += [trl.step() for _ in range(STEPS - 3)]
        status = fleet.engine.status()
    rewards = [float(step["reward"]) for step in steps]
    show(f"rewards {' '.join(f'{reward:.3f}' for reward in rewards)}")
    ratios = [float(step["sampling/importance_sampling_ratio/mean"]) for step in steps]
    assert ratios == pytest.approx([1.0] * STEPS, abs=1e-3)  # sampled by the weights that train
    assert min(rewards[-2:]) > 0.1 + max(rewards[:2])
    assert status.version == STEPS
