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
from trainer.api import SaveLoadMeta
from trainer.timetable import Timetable
from trainer.topology import Topology

_NAME = re.compile(r"step-(\d{8,})")
_STAGING = ".staging"
_TO_DELETE = ".to_delete"
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
    """Position of a run; all counters move together.

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


class StoredModel(Protocol):
    """A model that checkpoints hold: a `TrainEngine`, or one that runs elsewhere."""

    def save(self, meta: SaveLoadMeta) -> Future[None]:
        """See `TrainEngine`."""

    def load(self, meta: SaveLoadMeta) -> None:
        """See `TrainEngine`."""


class Stateful(Protocol):
    """Something that learns a few numbers."""

    def state_dict(self) -> dict[str, float]:
        """All of them."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the values that `state_dict` returned."""


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """Contents of a checkpoint besides the counters, by name."""

    models: Mapping[str, StoredModel]
    """Models, with their optimizers."""
    followers: Mapping[str, StoredModel] = field(default_factory=dict)
    """Models that change without an optimizer."""
    states: Mapping[str, Stateful] = field(default_factory=dict)
    is_split: bool = False
    """Some model is not on all ranks."""

    @property
    def folders(self) -> list[tuple[str, StoredModel, bool]]:
        """Name, engine, and whether its optimizer belongs to it."""
        trained = [(name, engine, True) for name, engine in self.models.items()]
        return trained + [(name, engine, False) for name, engine in self.followers.items()]


class Checkpoints:
    """The newest checkpoints of a run folder."""

    def __init__(
        self, run_dir: Path, config: RecoveryConfig, topology: Topology, steps_per_epoch: int = 1
    ) -> None:
        self._timetable = Timetable(config, steps_per_epoch, topology)
        self._root = run_dir / "checkpoints"
        self._config = config
        self._topology = topology
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[None] | None = None
        self._behind: Topology | None = None
        """The ranks, with collectives of the thread that writes."""
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
                "from it with recovery.mode=resume, or give the new run another run_dir"
            )

    def is_due(self, step: int, total_steps: int) -> bool:
        """True if a checkpoint has to be saved after `step` steps; collective."""
        is_due = self._timetable.is_due(step)
        return is_due or step == total_steps

    def save(self, contents: CheckpointContents, state: RunState) -> None:
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
        if contents.is_split and self._behind is None:
            self._behind = self._topology.apart()
        written = [
            engine.save(SaveLoadMeta(str(staging / name), "dcp", with_optim, is_asynchronous))
            for name, engine, with_optim in contents.folders
        ]
        numbers = {name: part.state_dict() for name, part in contents.states.items()}
        record = json.dumps(asdict(state) | {"numbers": numbers})
        rng = torch.get_rng_state()
        self._under_way = self._thread.submit(self._complete, written, state.step, record, rng)
        if not is_asynchronous:
            self.finish()

    def finish(self) -> None:
        """Wait until a running save is durable; collective, and before the engines are destroyed.

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

    def _complete(self, written: list[Future[None]], step: int, record: str, rng: Tensor) -> None:
        """Make a checkpoint visible once all of it is durable; then old ones may go."""
        wait(written)
        is_failed = any(part.exception() is not None for part in written)
        if self._behind is not None and self._behind.max(int(is_failed)) and not is_failed:
            raise StateError("another rank could not write its part; see its log")
        for part in written:
            part.result()
        if not self._topology.is_main:
            return
        staging = self._root / _STAGING
        torch.save(rng, staging / "rng.pt")
        (staging / "state.json").write_text(record)
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
        """Delete a folder, renaming it first: a crash leaves no half of a checkpoint under its name."""
        to_delete = self._root / _TO_DELETE
        shutil.rmtree(to_delete, ignore_errors=True)
        if folder.exists():
            folder.rename(to_delete)
            shutil.rmtree(to_delete, ignore_errors=True)

    def resume(self, contents: CheckpointContents) -> RunState | None:
        """Restore the newest checkpoint; None if there is none, unless `recovery.mode` wants one.

        Raises:
            ConfigError: it wants one; and as `load_newest`.
            StateError: as `load_newest`.
        """
        state = self.load_newest(contents)
        if state is None and self._config.mode == "resume":
            raise ConfigError(
                f"recovery.mode=resume, and {self._root} holds no checkpoint; set the run_dir of the run "
                "to go on with, or recovery.mode=auto"
            )
        return state

    def load_newest(self, contents: CheckpointContents) -> RunState | None:
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
            record = json.loads((folder / "state.json").read_text())
            numbers = record.pop("numbers", {})
            state = RunState(**record)
            rng = torch.load(folder / "rng.pt", weights_only=True)
        except _DAMAGE as error:
            raise StateError(
                f"checkpoint {folder} is damaged: {error}; delete it to use an older one"
            ) from error
        _refuse_others(folder, contents, numbers)
        for name, engine, with_optim in contents.folders:
            engine.load(SaveLoadMeta(str(folder / name), with_optim=with_optim))
        for name, part in contents.states.items():
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


def _refuse_others(folder: Path, contents: CheckpointContents, numbers: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another kind of experiment, before anything is loaded."""
    stored = {entry.name for entry in folder.iterdir() if entry.is_dir()} | set(numbers)
    wanted = {name for name, _, _ in contents.folders} | set(contents.states)
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
