"""Models, optimizers, schedules, version, data cursor and RNG as one unit: all of it or nothing.

    checkpoints/step-00000020/state.json  rng.pt  model/  critic/  reference/

Written into a staging directory that one rename makes visible once all of it is durable; a crash leaves
the one before. While one is written, training goes on (`recovery.asynchronous`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.contracts.config.recovery import RecoveryConfig
from headway.contracts.errors import ConfigError, StateError
from headway.contracts.types import PolicyVersion
from trainer.api import SaveLoadMeta, TrainEngine
from trainer.topology import Topology

_NAME = re.compile(r"step-(\d{8,})")
_STAGING = ".staging"
_DOOMED = ".doomed"
_DAMAGE = (
    OSError,
    EOFError,
    LookupError,
    AttributeError,
    TypeError,
    ValueError,
    RuntimeError,
    UnpicklingError,
)


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


class Stateful(Protocol):
    """Something that learns a few numbers."""

    def state_dict(self) -> dict[str, float]:
        """All of them."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """What `state_dict` gave."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a checkpoint holds besides the counters, by name."""

    models: Mapping[str, TrainEngine]
    """With their optimizers."""
    followers: Mapping[str, TrainEngine] = field(default_factory=dict)
    """Models that change without an optimizer."""
    numbers: Mapping[str, Stateful] = field(default_factory=dict)

    @property
    def folders(self) -> list[tuple[str, TrainEngine, bool]]:
        """Name, engine, and whether its optimizer belongs to it."""
        trained = [(name, engine, True) for name, engine in self.models.items()]
        return trained + [(name, engine, False) for name, engine in self.followers.items()]


class Checkpoints:
    """The newest checkpoints of a run folder."""

    def __init__(self, run_dir: Path, config: RecoveryConfig, topology: Topology) -> None:
        self._root = run_dir / "checkpoints"
        self._config = config
        self._topology = topology
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[None] | None = None
        self.safe_step = -1
        """Last step whose consumption a durable checkpoint holds; moved by the first rank alone."""

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

    def save(self, parts: Parts, state: RunState) -> None:
        """Store everything, or begin to; collective.

        Raises:
            StateError: this checkpoint could not be written, or the one before.
        """
        self.finish()
        staging, is_asynchronous = self._root / _STAGING, self._config.asynchronous
        if self._topology.is_main:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        self._topology.barrier()
        written = [
            engine.save(SaveLoadMeta(str(staging / name), "dcp", with_optim, is_asynchronous))
            for name, engine, with_optim in parts.folders
        ]
        numbers = {name: part.state_dict() for name, part in parts.numbers.items()}
        content = json.dumps(asdict(state) | {"numbers": numbers})
        rng = torch.get_rng_state()
        self._under_way = self._thread.submit(self._complete, written, state.step, content, rng)
        if not is_asynchronous:
            self.finish()

    def finish(self) -> None:
        """Wait until what is under way is durable; collective, and before the engines are destroyed.

        Raises:
            StateError: it could not be written; the checkpoint before is as it was. On every rank.
        """
        failure = None if self._under_way is None else self._under_way.exception()
        self._under_way = None
        if not self._topology.max(int(failure is not None)):
            return
        if isinstance(failure, StateError):
            raise failure
        what = failure or "another rank failed, see its log"
        raise StateError(
            f"a checkpoint in {self._root} could not be written: {what}; mend the cause and resume"
        ) from failure

    def _complete(self, written: list[Future[None]], step: int, content: str, rng: Tensor) -> None:
        """Make a checkpoint visible once all of it is durable; then old ones may go."""
        wait(written)
        for part in written:
            part.result()
        if not self._topology.is_main:
            return
        staging = self._root / _STAGING
        torch.save(rng, staging / "rng.pt")
        (staging / "state.json").write_text(content)
        for path in (*staging.rglob("*"), staging):
            _make_durable(path)
        final = self._folder(step)
        self._delete(final)
        staging.rename(final)
        _make_durable(self._root)
        self.safe_step = step - 1
        for old in self._steps()[: -self._config.keep]:
            self._delete(self._folder(old))

    def _delete(self, folder: Path) -> None:
        """By a rename first: a crash leaves no half of a checkpoint under its name."""
        doomed = self._root / _DOOMED
        shutil.rmtree(doomed, ignore_errors=True)
        if folder.exists():
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def load_newest(self, parts: Parts) -> RunState | None:
        """Restore the newest checkpoint, if there is one; collective.

        Raises:
            StateError: it is damaged, or one that was under way could not be written.
            ConfigError: it is of an experiment with other models, or of other settings.
        """
        self.finish()
        steps = self._steps()
        if not steps:
            return None
        folder = self._folder(steps[-1])
        try:
            content = json.loads((folder / "state.json").read_text())
            numbers = content.pop("numbers", {})
            state = RunState(**content)
            rng = torch.load(folder / "rng.pt", weights_only=True)
        except _DAMAGE as error:
            raise StateError(
                f"checkpoint {folder} is damaged: {error}; delete it to use an older one"
            ) from error
        _refuse_others(folder, parts, numbers)
        for name, engine, with_optim in parts.folders:
            engine.load(SaveLoadMeta(str(folder / name), with_optim=with_optim))
        for name, part in parts.numbers.items():
            part.load_state_dict(numbers[name])
        torch.set_rng_state(rng)
        self.safe_step = state.step - 1
        return state

    def _steps(self) -> list[int]:
        if not self._root.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self._root.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    def _folder(self, step: int) -> Path:
        return self._root / f"step-{step:08d}"


def _refuse_others(folder: Path, parts: Parts, numbers: Mapping[str, Any]) -> None:
    """Before anything is loaded: a checkpoint of another kind of experiment is not half of this one's."""
    stored = {entry.name for entry in folder.iterdir() if entry.is_dir()} | set(numbers)
    wanted = {name for name, _, _ in parts.folders} | set(parts.numbers)
    if stored != wanted:
        raise ConfigError(
            f"checkpoint {folder} does not fit the experiment: it holds {sorted(stored)}, wanted are "
            f"{sorted(wanted)}; give the new run another run_dir"
        )


def _make_durable(path: Path) -> None:
    """A file's bytes, or a directory's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
