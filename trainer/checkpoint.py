"""Model, optimizer, schedule, version, data cursor and RNG as one unit: all of it or nothing.

    checkpoints/step-00000020/state.json  model/  rng.pt

Written into a staging directory that one rename makes visible; a crash leaves the one before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError

import torch

from headway.contracts.config.recovery import RecoveryConfig
from headway.contracts.errors import ConfigError, StateError
from headway.contracts.types import PolicyVersion
from trainer.api import SaveLoadMeta, TrainEngine
from trainer.topology import Topology

_NAME = re.compile(r"step-(\d{8,})")
_STAGING = ".staging"


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands; all counters move together.

    The staleness counters follow from it: on attaching, the service takes them as version·B plus
    what its ledger holds unconsumed.
    """

    run_id: str
    step: int = 0
    """Steps done."""
    version: PolicyVersion = 0
    """Version of the weights."""
    cursor: int = 0
    """Prompts submitted, over all epochs."""
    trajectories: int = 0
    """Trajectories consumed."""

    def after_step(self, num_trajectories: int, cursor: int) -> RunState:
        """The state once a step trained on a batch and published its version."""
        return replace(
            self,
            step=self.step + 1,
            version=self.version + 1,
            cursor=cursor,
            trajectories=self.trajectories + num_trajectories,
        )


class Checkpoints:
    """The newest checkpoints of a run folder."""

    def __init__(self, run_dir: Path, config: RecoveryConfig, topology: Topology) -> None:
        self._root = run_dir / "checkpoints"
        self._config = config
        self._topology = topology

    def refuse_leftovers(self) -> None:
        """Raise if a former run left checkpoints here: a resume could not tell them from new ones.

        Raises:
            ConfigError: with what to do.
        """
        steps = self._steps()
        if steps:
            raise ConfigError(
                f"{self._root} holds checkpoints of a former run (newest: step {steps[-1]}); go on "
                "from it with recovery.resume=true, or give the new run another run_dir"
            )

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether to save after `step` steps."""
        return step % self._config.every_steps == 0 or step == total_steps

    def save(self, engine: TrainEngine, state: RunState) -> None:
        """Store everything; collective."""
        staging = self._root / _STAGING
        if self._topology.is_main:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        self._topology.barrier()
        engine.save(SaveLoadMeta(str(staging / "model")))
        if self._topology.is_main:
            torch.save(torch.get_rng_state(), staging / "rng.pt")
            _write_durably(staging / "state.json", json.dumps(asdict(state)))
            final = self._root / f"step-{state.step:08d}"
            shutil.rmtree(final, ignore_errors=True)
            staging.rename(final)
            for old in self._steps()[: -self._config.keep]:
                shutil.rmtree(self._folder(old), ignore_errors=True)
        self._topology.barrier()

    def load_newest(self, engine: TrainEngine) -> RunState | None:
        """Restore the newest checkpoint, if there is one; collective."""
        steps = self._steps()
        if not steps:
            return None
        folder = self._folder(steps[-1])
        try:
            state = RunState(**json.loads((folder / "state.json").read_text()))
            rng = torch.load(folder / "rng.pt", weights_only=True)
        except (OSError, EOFError, TypeError, ValueError, RuntimeError, UnpicklingError) as error:
            raise StateError(
                f"checkpoint {folder} is damaged: {error}; delete it to use an older one"
            ) from error
        engine.load(SaveLoadMeta(str(folder / "model")))
        torch.set_rng_state(rng)
        return state

    def _steps(self) -> list[int]:
        if not self._root.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self._root.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    def _folder(self, step: int) -> Path:
        return self._root / f"step-{step:08d}"


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
